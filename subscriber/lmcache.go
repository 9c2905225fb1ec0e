package subscriber

import "kvstrata/event"

// LMCache tells what it stored through vLLM's own publisher: a chunk of tokens for a block, LMCache's chunk hash for its hash.
// Its engine (medium "cpu") never tells what it evicted. Its multi-process server (medium "CPU") does.

// lmcacheMedium is what LMCache's engine calls its memory, and no other speaker of vLLM's dialect does.
const lmcacheMedium = "cpu"

// lmcache marks a STORED of a store that never tells an eviction as somebody else's: counted here, the chunk would be taken for
// resident for ever. The store's own source tells what it holds.
//
// Its chunks come with the first token of the next one, except at the prompt's end.
func (d *Decoder) lmcache(ev *event.Event) {
	ev.Locality = event.Remote
	if want := len(ev.Blocks) * int(ev.BlockSize); len(ev.Tokens) == want+1 {
		ev.Tokens = ev.Tokens[:want]
	}
	d.odd("stores of LMCache, which tells no evictions", "", nil)
}
