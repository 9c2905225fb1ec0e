package sim

import (
	"errors"
	"fmt"
	"time"

	"kvstrata/event"
)

// LoadConfig says what an engine's transfers are like. No bytes move: their number and duration are computed.
type LoadConfig struct {
	BlockBytes uint64       // bytes of one block's KV, all layers
	Bandwidth  uint64       // of the link, in bytes a second
	Hasher     event.Hasher // names the blocks: engines' events do, a connector's LOADED must do it itself
}

// DefaultLoadConfig is 16 tokens of an 8-billion-parameter model (2 MiB) over a link of 100 Gbit/s.
func DefaultLoadConfig() LoadConfig {
	return LoadConfig{BlockBytes: 2 << 20, Bandwidth: 12_500_000_000, Hasher: event.NewHasher("")}
}

// Validate returns every problem of the configuration, joined; nil when there is none.
func (c LoadConfig) Validate() error {
	var problems []error
	if c.BlockBytes == 0 || c.BlockBytes > 1<<40 {
		problems = append(problems, fmt.Errorf("block-bytes %d: want 1 to %d", c.BlockBytes, 1<<40))
	}
	if c.Bandwidth == 0 {
		problems = append(problems, errors.New("bandwidth 0: want bytes a second"))
	}
	return errors.Join(problems...)
}

// loads tells of transfers, as the engine's connector would.
type loads struct {
	cfg   LoadConfig
	pub   Publisher
	batch event.Batch // of the step so far
}

// ReportLoads makes the engine tell of each request whose KV arrived by transfer: one LOADED to a publisher of its own,
// since no engine's own stream has that word. It is called before the first request.
func (e *Engine) ReportLoads(cfg LoadConfig, pub Publisher) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	e.loads = &loads{cfg: cfg, pub: pub}
	return nil
}

// tellLoaded tells of the full blocks of a sequence from one on up to another, which a transfer brought.
func (e *Engine) tellLoaded(s *sequence, from, to int) {
	if from >= to {
		return
	}
	size := e.cfg.BlockSize
	e.hash(s, to)
	names := event.Prefixes(nil, s.slice(0, to*size), size, e.loads.cfg.Hasher.Seed(s.LoRA, s.Salt), false)
	blocks := make([]event.Block, to-from)
	for i := range blocks {
		blocks[i] = rawBlock(e.name(s.hashes[from+i]))
		blocks[i].Prefix = names[from+i]
	}
	bytes := uint64(len(blocks)) * e.loads.cfg.BlockBytes
	e.loads.batch.Events = append(e.loads.batch.Events, event.Event{
		Kind: event.Loaded, Blocks: blocks, Tier: event.GPU, Group: e.group(), BlockSize: uint32(size), LoRA: s.LoRA,
		LoRAID: event.NoLoRAID,
		Load: event.Load{
			From: event.GPU, Peer: s.Peer, Request: s.ID, Bytes: bytes,
			Duration: time.Duration(float64(bytes) / float64(e.loads.cfg.Bandwidth) * float64(time.Second)),
		},
	})
}

// publish sends what was told in a step.
func (l *loads) publish(now event.Time) error {
	if len(l.batch.Events) == 0 {
		return nil
	}
	b := &event.Batch{Time: now, Rank: -1, Events: l.batch.Events}
	l.batch.Events = nil
	return l.pub.Publish(b)
}
