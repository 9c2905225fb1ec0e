package gather

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvstrata/indexer/prefix"
)

// peer is an index.
type peer struct {
	url string

	mu   sync.Mutex
	info *prefix.ShardInfo // what it said that it keeps; nil before it said anything
	err  error             // why it could not be asked last
}

func (p *peer) get() (*prefix.ShardInfo, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.info, p.err
}

// note enters what became of asking it. What it keeps stays known while it is away.
func (p *peer) note(info *prefix.ShardInfo, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if info != nil {
		p.info = info
	}
	p.err = err
}

// usable reports whether it answered last, and had caught up.
func (p *peer) usable() bool {
	info, err := p.get()
	return err == nil && info != nil && info.Ready
}

// turns spreads questions over replicas.
type turns struct{ n atomic.Uint64 }

// part is one part of the range of prefix hashes, and the indexes that keep it.
type part struct {
	shard prefix.Shard
	peers []*peer
}

// ShardError says which shard did not answer.
type ShardError struct {
	Shard prefix.Shard
	Err   error
}

func (e *ShardError) Error() string {
	return fmt.Sprintf("shard %v does not answer: %v", e.Shard, e.Err)
}

func (e *ShardError) Unwrap() error { return e.Err }

// plan returns the parts of a model, each with those who keep it. Where indexes of several divisions are there, as while they
// are divided anew, one is chosen that is whole, with as few parts as can be.
func (g *Gather) plan(model string) ([]part, error) {
	divisions := make(map[uint32][]part) // by number of parts
	var unheard []error
	for _, p := range g.peers {
		info, err := p.get()
		if info == nil {
			unheard = append(unheard, fmt.Errorf("%s: %w", p.url, errors.Join(err, errNotHeard)))
			continue
		}
		if len(info.Models) > 0 && !slices.Contains(info.Models, model) {
			continue
		}
		of := max(info.Shard.Of, 1)
		if divisions[of] == nil {
			divisions[of] = make([]part, of)
			for i := range divisions[of] {
				divisions[of][i].shard = shardOf(uint32(i), of)
			}
		}
		one := &divisions[of][info.Shard.Index]
		one.peers = append(one.peers, p)
	}
	var best []part
	var missing error
	for of, parts := range divisions {
		switch i := slices.IndexFunc(parts, func(p part) bool { return len(p.peers) == 0 }); {
		case i >= 0:
			missing = &ShardError{parts[i].shard, errors.Join(append(unheard, errNobody)...)}
		case best == nil || int(of) < len(best):
			best = parts
		}
	}
	switch {
	case best != nil:
		return best, nil
	case missing != nil:
		return nil, missing
	case len(unheard) > 0:
		return nil, &ShardError{prefix.Shard{}, errors.Join(unheard...)}
	}
	return nil, g.unknown(model)
}

var (
	errNotHeard = errors.New("it has not said yet what it keeps")
	errNobody   = errors.New("none of --shards keeps it")
)

// unknown says that no shard is asked for a model.
func (g *Gather) unknown(model string) error {
	var models []string
	for _, p := range g.peers {
		if info, _ := p.get(); info != nil {
			models = append(models, info.Models...)
		}
	}
	return unknownModel(model, models)
}

func unknownModel(model string, known []string) error {
	slices.Sort(known)
	list := strings.Join(slices.Compact(known), ", ")
	if list == "" {
		list = "none yet"
	}
	return fmt.Errorf("model %q: %w; known: %s", model, prefix.ErrUnknownModel, list)
}

// shardOf returns one of so many parts.
func shardOf(index, of uint32) prefix.Shard {
	if of <= 1 {
		return prefix.Shard{}
	}
	return prefix.Shard{Index: index, Of: of}
}

// askPart asks the indexes of a part, one after the other, until one answers that has caught up. Where none has, what one says
// that has not may be too short, but is true.
func (g *Gather) askPart(ctx context.Context, p part, r *prefix.ShardRequest) (*prefix.ShardAnswer, error) {
	var behind *prefix.ShardAnswer
	var errs []error
	for _, peer := range g.inTurn(p.peers) {
		a := new(prefix.ShardAnswer)
		err := g.exchange(ctx, peer, http.MethodPost, "/v1/shard/lookup", r, a)
		if err == nil {
			err = checkAnswer(r, a)
		}
		switch {
		case ctx.Err() != nil: // the question is not asked any more
			return nil, &ShardError{p.shard, ctx.Err()}
		case err != nil:
			g.failed.WithLabelValues(p.shard.String()).Inc()
			peer.note(nil, err)
			errs = append(errs, fmt.Errorf("%s: %w", peer.url, err))
		case a.Ready:
			return a, nil
		case behind == nil:
			behind = a
		}
	}
	if behind != nil {
		return behind, nil
	}
	return nil, &ShardError{p.shard, errors.Join(errs...)}
}

// inTurn returns indexes in the order in which they are to be asked: those that answered last first, each time another one.
func (g *Gather) inTurn(peers []*peer) []*peer {
	if len(peers) == 1 {
		return peers
	}
	n := int(g.turn.n.Add(1) % uint64(len(peers)))
	order := append(slices.Clone(peers[n:]), peers[:n]...)
	slices.SortStableFunc(order, func(a, b *peer) int {
		rank := map[bool]int{true: 0, false: 1}
		return rank[a.usable()] - rank[b.usable()]
	})
	return order
}

// maxAnswer bounds a shard's answer, in bytes.
const maxAnswer = 64 << 20

// exchange asks one index.
func (g *Gather) exchange(ctx context.Context, p *peer, method, path string, question, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, g.cfg.Timeout)
	defer cancel()
	var body io.Reader
	if question != nil {
		payload, err := json.Marshal(question)
		if err != nil {
			return err
		}
		body = bytes.NewReader(payload)
	}
	req, err := http.NewRequestWithContext(ctx, method, p.url+path, body)
	if err != nil {
		return err
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("read the answer: %w", err)
	case len(text) > maxAnswer:
		return fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
	case resp.StatusCode != http.StatusOK:
		var problem struct{ Error string }
		if json.Unmarshal(text, &problem) == nil && problem.Error != "" {
			return fmt.Errorf("it says %d: %s", resp.StatusCode, problem.Error)
		}
		return fmt.Errorf("it answers %s; is it an index?", resp.Status)
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
}

// Run asks all indexes again and again what they keep, until ctx ends.
func (g *Gather) Run(ctx context.Context) error {
	tick := time.NewTicker(g.cfg.Refresh)
	defer tick.Stop()
	for {
		g.Refresh(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Refresh asks every index what it keeps, all at a time.
func (g *Gather) Refresh(ctx context.Context) {
	var all sync.WaitGroup
	for _, p := range g.peers {
		all.Go(func() {
			info := new(prefix.ShardInfo)
			err := g.exchange(ctx, p, http.MethodGet, "/v1/shard", nil, info)
			if ctx.Err() != nil {
				return
			}
			if _, before := p.get(); (before == nil) != (err == nil) {
				g.log.Info("an index went or came", "shard", p.url, "err", err)
			}
			if err != nil {
				info = nil
			}
			p.note(info, err)
		})
	}
	all.Wait()
}

// Ready says what is missing until every part of every model that an index is asked for can be asked, of an index that has caught
// up.
func (g *Gather) Ready() error {
	models := []string{""} // stands for all that are not named
	named := true
	for _, p := range g.peers {
		info, err := p.get()
		if info == nil {
			return fmt.Errorf("%s: %w", p.url, errors.Join(err, errNotHeard))
		}
		models = append(models, info.Models...)
		named = named && len(info.Models) > 0
	}
	if named {
		models = models[1:]
	}
	for _, model := range models {
		parts, err := g.plan(model)
		if err != nil {
			return err
		}
		for _, p := range parts {
			if !slices.ContainsFunc(p.peers, (*peer).usable) {
				return &ShardError{p.shard, errors.New("no index of it has caught up with the stream")}
			}
		}
	}
	return nil
}
