package prefix_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
)

// tb is what tests, benchmarks and rapid's checks have in common.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
	Fatal(args ...any)
}

// began is the engines' and our clocks' beginning.
var began = time.Date(2026, 11, 2, 9, 0, 0, 0, time.UTC)

// publisher is a source's one judge. What it makes of raw events travels as a message: encoded, without tokens, decoded.
type publisher struct {
	source event.Source
	epoch  event.Epoch
	fence  event.Fence
	judge  *resident.Set
	ledger event.Ledger
	next   event.Seq
	dec    event.Decoder
}

func newPublisher(source event.Source, asSet bool) *publisher {
	cfg := resident.DefaultConfig()
	cfg.AsSet = asSet
	return &publisher{source: source, epoch: 1, fence: 1, judge: resident.New(cfg)}
}

// engine names an engine of model m in cluster c.
func engine(instance string) event.Source {
	return event.Source{Cluster: "c", Model: "m", Instance: instance, Origin: event.Engine}
}

// restart begins a new life, which counts its batches from first.
func (p *publisher) restart(first event.Seq) {
	p.epoch++
	p.judge.Reset()
	p.ledger, p.next = event.Ledger{}, first
}

// message judges batches of raw events and returns what reaches consumers; it is reused by the next call.
func (p *publisher) message(t tb, batches ...[]event.Event) *event.Message {
	t.Helper()
	var enc event.Encoder
	for _, events := range batches {
		at := event.UnixTime(began) + event.Time(p.next)*event.Time(time.Millisecond)
		p.append(&enc, &event.Batch{
			First: p.next, Last: p.next, Way: event.Live, Time: at, Received: at + event.Time(time.Millisecond), Rank: -1, Events: events,
		})
	}
	return p.decode(t, &enc)
}

// lose returns the message that tells of n lost batches.
func (p *publisher) lose(t tb, n int) *event.Message {
	t.Helper()
	var enc event.Encoder
	p.append(&enc, &event.Batch{
		First: p.next, Last: p.next + event.Seq(n-1), Way: event.Lost, Reason: "no replay endpoint", Rank: -1,
		Events: []event.Event{cleared(event.ByResync)},
	})
	return p.decode(t, &enc)
}

func (p *publisher) append(enc *event.Encoder, b *event.Batch) {
	p.judge.Judge(b)
	p.ledger.Count(b)
	p.next = b.Last + 1
	for i := range b.Events {
		b.Events[i].Tokens, b.Events[i].Salt, b.Events[i].Terms = nil, "", nil
	}
	enc.Append(b)
}

func (p *publisher) decode(t tb, enc *event.Encoder) *event.Message {
	t.Helper()
	batches, err := p.dec.Decode(enc.Encode(nil))
	if err != nil {
		t.Fatalf("decode what was just encoded: %v", err)
	}
	return &event.Message{
		Source: p.source, Epoch: p.epoch, Fence: p.fence, Batches: batches, Digest: p.judge.Digest(), HasDigest: true,
	}
}

// checkpoint returns the object that the publisher would write now.
func (p *publisher) checkpoint(t tb) *bytes.Buffer {
	t.Helper()
	snap := p.judge.Snapshot()
	return p.object(t, &event.Checkpoint{State: event.StateLive, Digest: snap.Digest, Entries: snap.Len, Fullest: snap.Fullest}, snap)
}

func (p *publisher) object(t tb, cp *event.Checkpoint, snap *resident.Snapshot) *bytes.Buffer {
	t.Helper()
	cp.Source, cp.Epoch, cp.Fence, cp.Seq, cp.Ledger = p.source, p.epoch, p.fence, p.ledger.Last, p.ledger.Clone()
	cp.Groups = snap.Groups
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, cp, snap.Entries()); err != nil {
		t.Fatal(err)
	}
	return &object
}

// status returns what the publisher says of the source now.
func (p *publisher) status(state event.State, reason string) *event.Status {
	return &event.Status{
		Source: p.source, Epoch: p.epoch, Fence: p.fence, Seq: p.ledger.Last, State: state, Reason: reason,
		Digest: p.judge.Digest(), Ledger: p.ledger.Clone(), Copies: event.CopiesCounted, Groups: p.judge.Groups(),
	}
}

// chain is a prompt as an engine caches it in one cache group.
type chain struct {
	tokens     []uint32
	size       int // tokens a block
	eagle      bool
	group      event.Group
	spec       event.SpecKind
	behind     uint32 // its sliding window in tokens
	lora, salt string
	alias      int  // another one has other engine hashes for the same prefixes
	long       bool // engine hashes of 32 bytes
}

// text returns n tokens counted from first.
func text(first uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = first + uint32(i)
	}
	return tokens
}

// prompt returns the chain of n blocks of 16 tokens in a source without groups.
func prompt(first uint32, n int) chain {
	return chain{tokens: text(first, 16*n), size: 16, group: event.NoGroup}
}

func (c chain) window() int {
	if c.eagle {
		return c.size + 1
	}
	return c.size
}

// len returns how many blocks the prompt fills.
func (c chain) len() int { return max(0, (len(c.tokens)-c.window())/c.size+1) }

// covered returns the tokens of blocks 0 to i.
func (c chain) covered(i int) []uint32 { return c.tokens[:i*c.size+c.window()] }

// hash returns what the engine calls block i.
func (c chain) hash(i int) event.BlockHash {
	id := fmt.Sprintf("%x %d %s %s %d", event.LocalHash(c.covered(i), 0), c.size, c.lora, c.salt, c.alias)
	sum := sha256.Sum256([]byte(id))
	if c.long {
		return event.BytesHash(string(sum[:]))
	}
	return event.BytesHash(string(sum[:8]))
}

func (c chain) blocks(from, to int) []event.Block {
	blocks := make([]event.Block, 0, to-from)
	for i := from; i < to; i++ {
		blocks = append(blocks, event.Block{Hash: c.hash(i), Copies: -1, Age: -1})
	}
	return blocks
}

// stored tells blocks from up to, but without, to; as engines do, with the salt of a root only.
func (c chain) stored(tier event.Tier, from, to int) event.Event {
	ev := event.Event{
		Kind: event.Stored, Tier: tier, Group: c.group, BlockSize: uint32(c.size), Eagle: c.eagle, Spec: c.spec, Window: c.behind, LoRA: c.lora,
		LoRAID: event.NoLoRAID, Blocks: c.blocks(from, to), Tokens: c.tokens[from*c.size : (to-1)*c.size+c.window()],
	}
	if from > 0 {
		ev.HasParent, ev.Parent = true, c.hash(from-1)
	} else {
		ev.Salt = c.salt
	}
	return ev
}

// offloaded tells blocks without their tokens, as offloading engines do.
func (c chain) offloaded(tier event.Tier, from, to int) event.Event {
	return event.Event{Kind: event.Stored, Tier: tier, Group: c.group, LoRAID: event.NoLoRAID, Blocks: c.blocks(from, to)}
}

func (c chain) evicted(tier event.Tier, from, to int) event.Event {
	return event.Event{Kind: event.Evicted, Tier: tier, Group: c.group, LoRAID: event.NoLoRAID, Blocks: c.blocks(from, to)}
}

func cleared(cause event.ClearCause) event.Event {
	return event.Event{Kind: event.Cleared, Cause: cause, Group: event.NoGroup, LoRAID: event.NoLoRAID}
}

// hashes returns the prefix hashes of the chain's blocks.
func (c chain) hashes() []event.PrefixHash {
	return event.Prefixes(nil, c.tokens, c.size, event.Hasher{}.Seed(c.lora, c.salt), c.eagle)
}

// clock is a clock that is set by hand.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

// newIndex returns an index and its clock.
func newIndex() (*prefix.Index, *clock) {
	c := &clock{began}
	cfg := prefix.DefaultConfig()
	cfg.Clock = c.Now
	return prefix.New(cfg), c
}

// tell judges one batch and applies it.
func (p *publisher) tell(t tb, x *prefix.Index, events ...event.Event) {
	t.Helper()
	apply(t, x, p.message(t, events))
}

// apply gives an index a message, and checks the digest.
func apply(t tb, x *prefix.Index, m *event.Message) {
	t.Helper()
	digest, err := x.Apply(context.Background(), m)
	if err != nil {
		t.Fatalf("apply: %v", err)
	}
	if digest != m.Digest {
		t.Fatalf("digest %x, want %x", digest, m.Digest)
	}
}

func restore(t tb, x *prefix.Index, object *bytes.Buffer) {
	t.Helper()
	if _, err := x.Restore(context.Background(), object); err != nil {
		t.Fatalf("restore: %v", err)
	}
}

// lookup asks and must be answered.
func lookup(t tb, x *prefix.Index, r *prefix.Request) *prefix.Answer {
	t.Helper()
	a, err := x.Lookup(r)
	if err != nil {
		t.Fatalf("lookup: %v", err)
	}
	return a
}

var _ tb = testing.TB(nil)
