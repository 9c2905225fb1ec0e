package resident_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// Local hashes that a source tells instead of tokens give the names that its tokens would.
func TestLocalHashesNameARun(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	byTokens, byLocals := stored(0, 1, 11, 12, 13), stored(0, 1, 21, 22, 23)
	for i := range byLocals.Blocks {
		byLocals.Locals = append(byLocals.Locals, event.LocalHash(byLocals.Tokens[i*blockSize:(i+1)*blockSize], event.Hasher{}.Seed("", "")))
	}
	byLocals.Tokens = nil
	b := batch(0, byTokens, byLocals)
	s.Judge(b)
	for i := range b.Events[0].Blocks {
		if want, got := b.Events[0].Blocks[i].Prefix, b.Events[1].Blocks[i].Prefix; want == 0 || got != want {
			t.Errorf("block %d: %v by local hashes, %v by tokens", i, got, want)
		}
	}
	if odd := s.Oddities(); len(odd) > 0 {
		t.Errorf("oddities %+v", odd)
	}
}

// An EVICTED that names no tier takes the copy from where it is.
func TestAnEvictionThatNamesNoTier(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	host := stored(0, 1, 11)
	host.Tier = event.CPU
	b := batch(0, host, stored(11, 5, 12), evicted(event.AnyTier, 11), evicted(event.AnyTier, 12), evicted(event.AnyTier, 13))
	s.Judge(b)
	var got []event.Tier
	for _, ev := range b.Events[2:] {
		got = append(got, ev.Tier)
	}
	if diff := cmp.Diff([]event.Tier{event.CPU, event.GPU, event.GPU}, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if n := s.Blocks(); n != 0 || s.Digest() != 0 {
		t.Errorf("%d blocks are left", n)
	}
}

// The blocks of a LOADED get the names that they have.
func TestLoadedBlocksAreNamed(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	load := evicted(event.GPU, 11, 99)
	load.Kind = event.Loaded
	b := batch(0, stored(0, 1, 11), load)
	s.Judge(b)
	if got := b.Events[1].Blocks; got[0].Prefix != prefixes(1, 1)[0] || got[1].Prefix != 0 || got[0].Effect != 0 {
		t.Errorf("blocks %+v", got)
	}
}

// A sliding window's group tells the tokens of a whole run and only some of its blocks, below parents that it never told: that
// breaks nothing, and such blocks are counted, with a name only where there is one.
func TestAWindowTellsLessThanItsRun(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	part, below := stored(0, 1, 11, 12), stored(99, 9, 13)
	part.Blocks = part.Blocks[:1]
	for _, ev := range []*event.Event{&part, &below} {
		ev.Group, ev.Spec, ev.Window = 1, event.SpecSlidingWindow, 8
	}
	b := batch(0, part, below, stored(0, 1, 11))
	s.Judge(b)
	if odd := s.Oddities(); len(odd) > 0 {
		t.Errorf("oddities %+v", odd)
	}
	if s.Blocks() != 3 || b.Events[0].Blocks[0].Prefix != 0 || !b.Events[1].Unrooted || b.Events[2].Blocks[0].Prefix == 0 {
		t.Errorf("%d blocks; %+v", s.Blocks(), b.Events)
	}
}

// A group is what its blocks on the device are: chunks of a store, blocks elsewhere and half-full ones don't change it.
func TestAGroupIsWhatTheDeviceTells(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	chunk, remote, small := stored(0, 1, 21), stored(0, 1, 22), stored(0, 1, 23)
	chunk.Tier, chunk.BlockSize = event.CPU, 256
	remote.Locality, remote.BlockSize = event.Remote, 64
	small.BlockSize = 2
	s.Judge(batch(0, stored(0, 1, 11), chunk, remote, small))
	if groups := s.Groups(); len(groups) != 1 || groups[0].BlockSize != blockSize {
		t.Errorf("groups %+v", groups)
	}
}

// A run of evictions that name no tier is cut where the blocks lie in another one.
func TestEvictionsThatLieInSeveralTiers(t *testing.T) {
	s := resident.New(resident.DefaultConfig())
	host := stored(0, 1, 11, 12)
	host.Tier = event.CPU
	b := batch(0, host, stored(12, 9, 13), evicted(event.AnyTier, 11, 13, 12), evicted(event.AnyTier))
	s.Judge(b)
	if s.Blocks() != 0 || s.Digest() != 0 || len(s.Oddities()) > 0 {
		t.Errorf("%d blocks are left, oddities %+v", s.Blocks(), s.Oddities())
	}
	var got []event.Tier
	for _, ev := range b.Events[2:] {
		got = append(got, ev.Tier)
	}
	if diff := cmp.Diff([]event.Tier{event.CPU, event.GPU, event.CPU, event.GPU}, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
