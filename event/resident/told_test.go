package resident_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/event/resident"
)

// Local hashes that a source tells instead of tokens give the names that its tokens would.
func TestLocalHashesNameARun(t *testing.T) {
	s := resident.New(resident.DefaultConfig(), nil)
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
	s := resident.New(resident.DefaultConfig(), nil)
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
	s := resident.New(resident.DefaultConfig(), nil)
	load := evicted(event.GPU, 11, 99)
	load.Kind = event.Loaded
	b := batch(0, stored(0, 1, 11), load)
	s.Judge(b)
	if got := b.Events[1].Blocks; got[0].Prefix != prefixes(1, 1)[0] || got[1].Prefix != 0 || got[0].Effect != 0 {
		t.Errorf("blocks %+v", got)
	}
}
