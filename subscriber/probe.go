package subscriber

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/pebbe/zmq4"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// Report is what was heard of an engine in a while, without publishing anything.
type Report struct {
	Status    event.Status
	Connected bool
	Refused   string        // why the engine can't be heard, where that is known
	Replays   bool          // the replay socket answered
	Live      uint64        // messages that came on the live socket
	Topics    []string      // of these, whatever the configuration filters
	Behind    time.Duration // the least by which a live batch's time lay behind our clock: the engine's clock, and the way
	HasBehind bool

	names map[event.PrefixHash]event.BlockHash // of roots and what follows them
}

// Probe hears an engine until ctx ends, as a subscriber would, but on every topic. It fails only where the engine's address can't
// be opened; what was not heard is in the report.
func Probe(ctx context.Context, cfg Config, engineCfg EngineConfig) (r *Report, err error) {
	if err := checkHashing(&engineCfg); err != nil {
		return nil, err
	}
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, fmt.Errorf("make ZeroMQ context: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	everything := engineCfg
	everything.Topic = ""
	f, err := openFeed(zctx, everything)
	if err != nil {
		return nil, err
	}
	defer f.close()
	e := newEngine(&Subscriber{cfg: cfg, log: slog.New(slog.DiscardHandler)}, engineCfg)
	judge := cfg.Judge
	judge.Hasher, judge.AsSet = event.NewHasher(cfg.HashKey), engineCfg.AsSet
	e.set, e.stream = resident.New(judge), nowhere{}
	p := &probed{feed: f}
	if err := e.listen(ctx, p, nil); err != nil {
		return nil, err
	}
	r = &p.report
	r.Status, r.Refused = *e.status(time.Now()), f.refusal()
	if s, ok := f.(*sockets); ok {
		r.Topics = s.topics.names
	}
	r.names = make(map[event.PrefixHash]event.BlockHash)
	for entry := range e.set.Resident() {
		if entry.Prefix != 0 {
			r.names[entry.Prefix] = entry.Hash
		}
	}
	return r, nil
}

// NamesDiffer compares how two engines name blocks of the same prefix: how many both have, and how many have two names.
func (r *Report) NamesDiffer(other *Report) (common, differ int) {
	for prefix, hash := range r.names {
		if theirs, ok := other.names[prefix]; ok {
			common++
			if theirs != hash {
				differ++
			}
		}
	}
	return common, differ
}

// probed is a feed that notes what comes.
type probed struct {
	feed
	report Report
}

func (p *probed) poll(ctx context.Context, timeout time.Duration) ([]input, error) {
	inputs, err := p.feed.poll(ctx, timeout)
	now := time.Now()
	for i := range inputs {
		switch in := &inputs[i]; in.kind {
		case peerConnected:
			p.report.Connected = true
		case replayFrame, replayEnd:
			p.report.Replays = true
		case liveFrame:
			p.report.Live++
			if in.frame.Time == 0 {
				continue
			}
			if behind := now.Sub(in.frame.Time.Std()); !p.report.HasBehind || behind < p.report.Behind {
				p.report.Behind, p.report.HasBehind = behind, true
			}
		}
	}
	return inputs, err
}

// nowhere is a stream that publishes nothing.
type nowhere struct{ Stream }

func (nowhere) Publish(context.Context, event.Epoch, *event.Batch, event.Digest) {}
func (nowhere) Status(*event.Status) error                                       { return nil }
func (nowhere) CheckpointDue(time.Time, uint64) bool                             { return false }
func (nowhere) Checkpoint(*event.Checkpoint, *resident.Snapshot)                 {}

// maxTopics bounds the topics that are remembered.
const maxTopics = 16

// topics are the first topics that were seen.
type topics struct {
	names []string
	last  string
}

func (t *topics) note(topic []byte) {
	if t.names != nil && string(topic) == t.last {
		return
	}
	t.last = string(topic)
	if len(t.names) < maxTopics && !slices.Contains(t.names, t.last) {
		t.names = append(t.names, t.last)
	}
}
