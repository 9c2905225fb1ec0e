package sim

import (
	"fmt"
	"math"
	"slices"

	"kvstrata/connector"
	"kvstrata/event"
)

// Progress is what one step did.
type Progress struct {
	Scheduled int       // requests that computed tokens or began to load them
	Tokens    int       // computed
	Preempted int       // requests that lost their blocks
	Arrived   int       // requests whose load by a connector has ended, well or not
	Finished  []Request // in the order of their admission, as they were submitted, with what a connector answers
}

// Stepped reports whether the step did anything.
func (p Progress) Stepped() bool { return p.Scheduled+p.Preempted+p.Arrived > 0 }

// Step runs one step of the scheduler: every running request gets its next tokens, newest preempted where the pool has
// no room; then, unless one was preempted, waiting ones are admitted, oldest first, as far as room and tokens reach;
// requests that are done give their blocks back. What happened in the pool goes out as one batch stamped now, or as
// none. As in vLLM, blocks are cached when they are allocated, before they are computed.
func (e *Engine) Step(now event.Time) (Progress, error) {
	var progress Progress
	budget := e.cfg.TokensPerStep
	if budget == 0 {
		budget = math.MaxInt
	}
	budget = e.advance(&progress, budget)
	if progress.Preempted == 0 {
		e.admit(&progress, budget)
	}
	if e.kv != nil {
		if err := e.transfer(&progress); err != nil {
			return progress, err
		}
	}
	e.settle(&progress)
	if !progress.Stepped() && e.kv == nil && e.Busy() {
		panic("sim: Engine.Step: requests wait for room in an idle pool")
	}
	return progress, e.publish(now)
}

// advance gives the running requests their tokens and returns what is left of the budget.
func (e *Engine) advance(progress *Progress, budget int) int {
	for i := 0; i < len(e.running) && budget > 0; i++ {
		s := e.running[i]
		if s.loading {
			e.loaded(s)
		}
		n := min(s.tokens()-s.computed, budget)
		for !e.allocate(s, n) {
			victim := e.running[len(e.running)-1]
			e.preempt(victim)
			progress.Preempted++
			if victim == s {
				return budget
			}
		}
		s.scheduled = n
		budget -= n
		progress.Scheduled++
		progress.Tokens += n
	}
	return budget
}

// admit moves waiting requests into the batch while there is room. One that must wait for its connector's answer is passed
// over.
func (e *Engine) admit(progress *Progress, budget int) {
	for i := 0; i < len(e.waiting) && budget > 0 && e.inFlight() < e.cfg.MaxRunning; {
		s := e.waiting[i]
		n := e.start(s, budget)
		switch {
		case n == askLater:
			i++
			continue
		case n == noRoom:
			return
		}
		e.waiting = slices.Delete(e.waiting, i, i+1)
		if s.incoming > 0 {
			e.kv.remote = append(e.kv.remote, s)
		} else {
			e.running = append(e.running, s)
		}
		s.scheduled = n
		budget -= n
		progress.Scheduled++
		progress.Tokens += n
	}
}

// inFlight returns how many requests hold blocks and have not finished.
func (e *Engine) inFlight() int {
	if e.kv == nil {
		return len(e.running)
	}
	return len(e.running) + len(e.kv.remote)
}

// What start returns when it admits nothing.
const (
	noRoom   = -1 // in the pool
	askLater = -2 // the connector does not know yet
)

// start reuses what is cached of a waiting request, allocates the rest and returns how many tokens it computes in this
// step: none when its prompt is loaded instead. It returns noRoom or askLater, with nothing changed, when it admits nothing.
func (e *Engine) start(s *sequence, budget int) int {
	size := e.cfg.BlockSize
	// The last token is computed in any case, since the next one comes from it. Preempted requests have generated ones.
	e.hash(s, (s.tokens()-1)/size)
	hits, idle := s.blocks[:0], 0
	for _, h := range s.hashes[:(s.tokens()-1)/size] {
		id, ok := e.pool.Lookup(h)
		if !ok {
			break
		}
		if !e.pool.InUse(id) {
			idle++
		}
		hits = append(hits, id)
	}
	s.blocks = hits[:0]
	computed := len(hits) * size
	want, incoming := min(s.tokens(), computed+min(budget, s.tokens()-computed)), 0
	switch {
	case e.kv != nil:
		match := e.matched(s, computed)
		if match.Later {
			return askLater
		}
		if incoming = match.Tokens; incoming > 0 {
			want = computed + incoming
		}
	case s.external:
		want = len(s.Prompt)
	}
	missing, whole := (want+size-1)/size-len(hits), (s.tokens()+size-1)/size-len(hits)
	if whole+idle > e.pool.Free() { // all of it must fit, though it may come in chunks
		return noRoom
	}
	for _, id := range hits {
		e.pool.Touch(id)
	}
	s.blocks = e.pool.Allocate(hits, missing)
	s.cached, s.computed = len(hits), computed
	if !s.admitted {
		s.admitted = true
		e.stats.PromptTokens += uint64(len(s.Prompt))
		e.stats.BlockLookups += uint64(len(s.Prompt) / size)
		e.stats.BlockHits += uint64(len(hits))
	}
	if e.kv != nil {
		s.incoming = incoming
		e.allocated(s, computed, incoming)
		if incoming > 0 {
			return 0
		}
	} else if s.external {
		s.loading = true
		return 0
	}
	e.cache(s, want/size)
	return want - computed
}

// loaded caches what a transfer brought: all of the prompt but its last token, which is computed next.
func (e *Engine) loaded(s *sequence) {
	e.stats.LoadedTokens += uint64(len(s.Prompt) - s.computed)
	s.loading, s.external = false, false
	s.computed = len(s.Prompt) - 1
	from, to := s.cached, s.computed/e.cfg.BlockSize
	e.stats.BlocksLoaded += uint64(max(to-from, 0))
	e.cache(s, to)
}

// allocate makes room for the next n tokens of a running request and caches the blocks that they fill. It returns
// false, with nothing changed, when the pool has no room.
func (e *Engine) allocate(s *sequence, n int) bool {
	size := e.cfg.BlockSize
	missing := (s.computed+n+size-1)/size - len(s.blocks)
	if missing > e.pool.Free() {
		return false
	}
	if missing > 0 {
		s.blocks = e.pool.Allocate(s.blocks, missing)
	}
	e.cache(s, (s.computed+n)/size)
	return true
}

// preempt takes a running request's blocks and puts it back to the head of the queue, to start over.
func (e *Engine) preempt(s *sequence) {
	last := len(e.running) - 1
	if e.running[last] != s {
		panic(fmt.Sprintf("sim: preempt %q: not the newest", s.ID))
	}
	e.running[last] = nil
	e.running = e.running[:last]
	e.release(s)
	if e.kv != nil {
		e.kv.step.Preempted = append(e.kv.step.Preempted, s.ID)
	}
	e.waiting = append(e.waiting, nil)
	copy(e.waiting[1:], e.waiting)
	e.waiting[0] = s
	e.stats.Preempted++
}

func (e *Engine) release(s *sequence) {
	e.pool.Release(s.blocks)
	s.blocks = s.blocks[:0]
	s.cached, s.computed, s.scheduled, s.incoming, s.loading = 0, 0, 0, 0, false
}

// settle does what follows the computation: a request whose tokens are all computed gets one more, or is done.
func (e *Engine) settle(progress *Progress) {
	e.stats.ComputedTokens += uint64(progress.Tokens)
	kept := e.running[:0]
	for _, s := range e.running {
		s.computed += s.scheduled
		if s.scheduled > 0 && s.computed == s.tokens() {
			s.generated++
			e.stats.GeneratedTokens++
		}
		s.scheduled = 0
		if !s.done() {
			kept = append(kept, s)
			continue
		}
		e.finish(s, connector.EndLength, progress)
	}
	clear(e.running[len(kept):])
	e.running = kept
}
