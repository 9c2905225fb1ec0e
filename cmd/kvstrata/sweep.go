package main

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
	"kvstrata/event"
	"kvstrata/publisher"
)

// sweptTeller hears from connectors what may be in a store that tells nothing, and asks it.
type sweptTeller struct {
	*lmcache.Sweeper
	spec    *storeSpec
	blocks  int // of a group
	backend *lmcache.Backend
	bus     *bus.Bus
	fence   event.Fence
	log     *slog.Logger

	heard  chan struct{} // closed when everything was heard that connectors told before this began
	silent atomic.Bool   // the store did not answer when it was last asked
	swept  atomic.Bool
	cut    atomic.Bool // the stream does not begin with its first message
	odd    bool        // a run was heard that is not made of whole groups
}

// sweeper makes who sweeps the store. It is asked for keys only: how the caches lie does not matter.
func (s *storeSpec) sweeper(pub publisher.EventPublisher, b *bus.Bus, fence event.Fence, log *slog.Logger) (*sweptTeller, error) {
	cfg := lmcache.DefaultConfig()
	if err := s.extra.Into(&cfg, append(store.Keys(), lmcache.Keys()...)...); err != nil {
		return nil, err
	}
	if cfg.ChunkHashes != "engine" {
		return nil, errors.New(`chunk_hashes: a store whose keys are made of tokens can't be swept, for events hold none; set "chunk_hashes": "engine" for the engines and here`)
	}
	blocks, err := cfg.GroupBlocks(s.blockSize)
	if err != nil {
		return nil, err
	}
	dtype, err := lmcache.ParseDType(s.dtype)
	if err != nil {
		return nil, err
	}
	shape := lmcache.Shape{Format: lmcache.KV2LTD, DType: dtype, KV: 2, Layers: 1, Hidden: 1}
	sweep := lmcache.DefaultSweepConfig()
	sweep.Block, sweep.Ranks = s.blockSize, s.ranks
	if s.mla {
		shape.Format, shape.KV, sweep.Ranks = lmcache.KVMLA, 1, 1
	}
	if s.every > 0 {
		sweep.Interval = s.every
	}
	t := &sweptTeller{spec: s, blocks: blocks, bus: b, fence: fence, log: log, heard: make(chan struct{})}
	if t.backend, err = lmcache.New(cfg, connector.Model{Name: s.source.Model, BlockTokens: s.blockSize, Ranks: s.ranks}, shape); err != nil {
		return nil, err
	}
	if t.Sweeper, err = lmcache.NewSweeper(sweep, t, pub, log); err != nil {
		return nil, errors.Join(err, t.backend.Close())
	}
	return t, nil
}

// Name returns the store's address without secrets.
func (t *sweptTeller) Name() string { return t.backend.Name() }

// Key returns a group's key.
func (t *sweptTeller) Key(g *store.Group) string { return t.backend.Key(g) }

// Exist asks the store, and notes whether it answers.
func (t *sweptTeller) Exist(ctx context.Context, keys []string) ([]bool, error) {
	there, err := t.backend.Exist(ctx, keys)
	if ctx.Err() == nil {
		t.silent.Store(err != nil)
	}
	return there, err
}

func (t *sweptTeller) close() error { return t.backend.Close() }

func (t *sweptTeller) state() (event.State, string) {
	switch {
	case !t.swept.Load():
		return event.StateRecovering, "not every block that connectors told of was asked for yet"
	case t.silent.Load():
		return event.StateRecovering, "the store does not answer"
	case t.cut.Load():
		return event.StatePartial, "what was stored before the event stream begins is known only if it was stored again"
	default:
		return event.StateLive, ""
	}
}

func (t *sweptTeller) counts() storeCounts {
	st := t.Stats()
	return storeCounts{groups: st.Resident, reconciled: st.Sweeps, dropped: st.Forgotten + st.Dropped}
}

// Run hears what connectors have told and tell, and sweeps.
func (t *sweptTeller) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return t.hear(ctx) })
	group.Go(func() error {
		select {
		case <-t.heard:
		case <-ctx.Done():
			return nil
		}
		for ctx.Err() == nil {
			err := t.Sweep(ctx)
			if err == nil {
				t.swept.Store(true)
				return t.Sweeper.Run(ctx)
			}
			if ctx.Err() == nil {
				t.log.Warn("the store does not answer; asking again", "store", t.Name(), "err", err)
				pauseFor(ctx, time.Second)
			}
		}
		return nil
	})
	return errors.Join(group.Wait(), t.backend.Close())
}

// hear reads the events of the model's connectors from the stream's beginning on. That a message is heard twice, or comes from
// a life that is over, does not matter: what it tells is asked for.
func (t *sweptTeller) hear(ctx context.Context) error {
	for ctx.Err() == nil {
		err := t.read(ctx)
		if ctx.Err() != nil {
			return nil
		}
		t.log.Warn("what connectors tell can't be read; reading anew", "err", err)
		pauseFor(ctx, 500*time.Millisecond)
	}
	return nil
}

func (t *sweptTeller) read(ctx context.Context) error {
	first, err := t.bus.First(ctx)
	if err != nil {
		return err
	}
	reader, err := t.bus.ReadTold(ctx, 1, t.spec.source)
	if err != nil {
		return err
	}
	defer reader.Close()
	t.cut.Store(first > 1)
	var decoder event.Decoder
	for {
		d, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		if err := t.take(d, &decoder); err != nil {
			t.log.Warn("a message of a connector can't be read; skipped", "source", d.Source.String(), "err", err)
		}
		if err := d.Ack(); err != nil {
			return err
		}
	}
}

// take takes one message. The first status of this publisher stands behind everything that was told before.
func (t *sweptTeller) take(d *bus.Delivery, decoder *event.Decoder) error {
	if d.Kind == bus.Status {
		st, err := event.UnmarshalStatus(d.Data, d.Source)
		if err != nil {
			return err
		}
		select {
		case <-t.heard:
		default:
			if st.Fence == t.fence {
				close(t.heard)
			}
		}
		return nil
	}
	batches, err := decoder.Decode(d.Data)
	if err != nil {
		return err
	}
	for i := range batches {
		for k := range batches[i].Events {
			if err := t.tell(&batches[i].Events[k]); err != nil {
				return err
			}
		}
	}
	return nil
}

// tell hands the sweeper what a connector has stored on all ranks.
func (t *sweptTeller) tell(ev *event.Event) error {
	if ev.Kind != event.Stored || ev.Locality != event.Remote || ev.Ownership != t.spec.source.Instance {
		return nil
	}
	if len(ev.Blocks)%t.blocks != 0 && !t.odd {
		t.odd = true
		t.log.Warn("a connector stores groups of another size; blocks are missed until chunk_size and --store-block-size are the engines'",
			"blocks", len(ev.Blocks), "expected", t.blocks)
	}
	g := store.Group{HasParent: ev.HasParent, Parent: connector.Name{Hash: ev.Parent}, LoRA: ev.LoRA, Blocks: make([]connector.Name, t.blocks)}
	for rest := ev.Blocks; len(rest) >= t.blocks; rest = rest[t.blocks:] {
		for i := range g.Blocks {
			g.Blocks[i] = connector.Name{Hash: rest[i].Hash, Prefix: rest[i].Prefix}
		}
		ranks := t.spec.ranks
		if t.spec.mla {
			ranks = 1
		}
		for g.Rank = 0; g.Rank < ranks; g.Rank++ {
			if err := t.Told(&g); err != nil {
				return err
			}
		}
		g.HasParent, g.Parent = true, g.Blocks[t.blocks-1]
	}
	return nil
}
