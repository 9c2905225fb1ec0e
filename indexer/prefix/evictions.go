package prefix

import "kvstrata/event"

// maxEvictions bounds the evictions that an index remembers, of all sources together: 2 MiB when full.
const maxEvictions = 1 << 16

// eviction is a block with a name that left a tier of a group.
type eviction struct {
	prefix event.PrefixHash
	tier   uint16
	time   event.Time // when its subscriber received the batch; 0 = not told
	source uint32
	group  uint32
}

// evictions is a ring of the newest ones.
type evictions struct {
	ring   []eviction
	oldest int // once the ring is full
}

func (r *evictions) add(e eviction) {
	if len(r.ring) < maxEvictions {
		r.ring = append(r.ring, e)
		return
	}
	r.ring[r.oldest] = e
	r.oldest = (r.oldest + 1) % maxEvictions
}

// since returns from when on nothing was forgotten; 0 while nothing was.
func (r *evictions) since() event.Time {
	if len(r.ring) < maxEvictions {
		return 0
	}
	return r.ring[r.oldest].time
}

// evictedKey is a block whose evictions are asked for.
type evictedKey struct {
	prefix event.PrefixHash
	source uint32
	group  uint32
}

// collect appends to the wanted blocks the evictions of each, oldest first.
func (r *evictions) collect(wanted map[evictedKey][]eviction) {
	if len(wanted) == 0 {
		return
	}
	for i := range r.ring {
		e := &r.ring[(r.oldest+i)%len(r.ring)]
		k := evictedKey{e.prefix, e.source, e.group}
		if list, ok := wanted[k]; ok {
			wanted[k] = append(list, *e)
		}
	}
}
