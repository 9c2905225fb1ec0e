package resident_test

import (
	"bytes"
	"testing"

	"kvstrata/event"
	"kvstrata/event/resident"

	"github.com/google/go-cmp/cmp"
)

// A block is cut in one way, whatever a checkpoint tells of it twice.
func TestLoadDescribesABlockOnce(t *testing.T) {
	h := event.IntHash(11)
	rows := []event.Entry{
		{Hash: h, Group: event.NoGroup, Tier: event.GPU, Copies: 1, Prefix: 7, BlockSize: 16},
		{Hash: h, Group: event.NoGroup, Tier: event.CPU, Copies: 1, Prefix: 7, BlockSize: 4},
	}
	cp := event.Checkpoint{Source: event.Source{Model: "m", Origin: event.Engine}, Epoch: 1, Entries: 2}
	cp.Digest = event.Mix64(h, 0, event.GPU) + event.Mix64(h, 0, event.CPU)
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, &cp, func(yield func(*event.Entry) bool) { _ = yield(&rows[0]) && yield(&rows[1]) }); err != nil {
		t.Fatal(err)
	}
	s := resident.New(resident.Config{})
	if _, err := s.Load(&object); err != nil {
		t.Fatal(err)
	}
	sizes := make(map[event.Tier]uint32)
	for e := range s.Resident() {
		sizes[e.Tier] = e.BlockSize
	}
	if diff := cmp.Diff(map[event.Tier]uint32{event.GPU: 16, event.CPU: 16}, sizes); diff != "" {
		t.Error(diff)
	}
}

// The judge and who follows it describe groups alike, also after a naming event of blocks of an earlier size.
func TestNamingDoesNotDescribeTheGroupToFollowersOnly(t *testing.T) {
	judge, follower := resident.New(resident.DefaultConfig()), resident.New(resident.Config{})
	wide := stored(0, 100, 21)
	wide.BlockSize = 2 * blockSize
	wide.Tokens = append(wide.Tokens, wide.Tokens...)
	offload := event.Event{Kind: event.Stored, Tier: event.CPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: []event.Block{raw(11)}}
	for seq, ev := range []event.Event{stored(0, 1, 11), wide, offload} {
		b := batch(event.Seq(seq), ev)
		judge.Judge(b)
		if err := follower.Apply(b); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(judge.Groups(), follower.Groups()); diff != "" {
		t.Error(diff)
	}
}
