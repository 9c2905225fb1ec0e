package sim

import "kvstrata/event"

// hash makes sure that a sequence's first n blocks, which must be full, have hashes.
func (e *Engine) hash(s *sequence, n int) {
	size := e.cfg.BlockSize
	if s.hashes == nil {
		s.hashes = make([]uint64, 0, max(n, len(s.Prompt)/size))
	}
	parent := e.hasher.none
	if have := len(s.hashes); have > 0 {
		parent = s.hashes[have-1]
	}
	for i := len(s.hashes); i < n; i++ {
		parent = e.hasher.block(parent, s.slice(i*size, (i+1)*size), s.extraKeys(i))
		s.hashes = append(s.hashes, parent)
	}
}

// cache makes a sequence's first full blocks known to the pool and tells of those that were not: one run, one STORED.
func (e *Engine) cache(s *sequence, full int) {
	if full <= s.cached {
		return
	}
	e.hash(s, full)
	from := s.cached
	blocks := make([]event.Block, full-from)
	for i := range blocks {
		h := s.hashes[from+i]
		e.pool.Cache(s.blocks[from+i], h)
		blocks[i] = rawBlock(e.name(h))
	}
	size := e.cfg.BlockSize
	ev := event.Event{
		Kind: event.Stored, Blocks: blocks, Tier: event.GPU, Group: e.group(), BlockSize: uint32(size),
		LoRA: s.LoRA, LoRAID: event.NoLoRAID, Session: s.Session,
		Tokens: s.slice(from*size, full*size), ExtraKeys: e.extraKeys(s, from, full),
	}
	if from > 0 {
		ev.HasParent, ev.Parent = true, e.name(s.hashes[from-1])
	}
	if e.cfg.ReportGroup {
		ev.Spec = event.SpecFull
	}
	e.events = append(e.events, ev)
	e.stats.BlocksStored += uint64(len(blocks))
	s.cached = full
}

// extraKeys returns one entry a block, nil for a block without keys.
func (e *Engine) extraKeys(s *sequence, from, to int) [][]byte {
	n := to - from
	if s.extra == nil && (from > 0 || s.firstExtra == nil) {
		if len(e.noKeys) < n {
			e.noKeys = make([][]byte, 2*n)
		}
		return e.noKeys[:n:n]
	}
	keys := make([][]byte, n)
	for i := range keys {
		keys[i] = s.extraKeys(from + i)
	}
	return keys
}

// evicted tells of a block that the pool took for something else. vLLM sends one BlockRemoved a block; neighbours share
// one event here, which means the same in fewer bytes.
func (e *Engine) evicted(hash uint64) {
	e.stats.BlocksEvicted++
	block := rawBlock(e.name(hash))
	if n := len(e.events); n > 0 && e.events[n-1].Kind == event.Evicted {
		e.events[n-1].Blocks = append(e.events[n-1].Blocks, block)
		return
	}
	e.events = append(e.events, event.Event{
		Kind: event.Evicted, Blocks: []event.Block{block}, Tier: event.GPU, Group: e.group(), LoRAID: event.NoLoRAID,
	})
}

// rawBlock is a block that nobody has judged yet.
func rawBlock(hash event.BlockHash) event.Block { return event.Block{Hash: hash, Copies: -1, Age: -1} }

func (e *Engine) publish(now event.Time) error {
	if e.kv != nil {
		if err := e.kv.tell(now); err != nil {
			return err
		}
	}
	if len(e.events) == 0 {
		return nil
	}
	b := &event.Batch{Time: now, Events: e.events}
	e.events = nil
	e.stats.Batches++
	return e.pub.Publish(b)
}
