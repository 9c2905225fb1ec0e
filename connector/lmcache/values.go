package lmcache

import (
	"container/list"
	"sync"
)

// values is a server's memory: values by key, of which the least recently got leave when room is wanted. Room is taken
// before a value's bytes are read, so that the bound holds for what is on its way in, too.
type values struct {
	most int // bytes

	mu      sync.Mutex
	used    int // bytes of what is kept, promised, spare, or evicted and still being sent
	byKey   map[string]*list.Element
	recent  *list.List       // of *value; the front is the oldest
	spare   map[int][][]byte // memory of values that left, by size: to make it anew costs as much as to fill it
	evicted uint64
}

// value is one chunk. What has left may still be sent.
type value struct {
	key     string
	content Content
	data    []byte
	readers int  // under values.mu
	left    bool // under values.mu: is no longer to be found
}

func newValues(most int) *values {
	return &values{most: most, byKey: make(map[string]*list.Element), recent: list.New(), spare: make(map[int][][]byte)}
}

// take promises n bytes, and returns them; nil when there is no room even without all that may leave. The caller keeps or
// drops them.
func (v *values) take(n int) []byte {
	v.mu.Lock()
	defer v.mu.Unlock()
	for {
		if have := v.spare[n]; len(have) > 0 {
			v.spare[n] = have[:len(have)-1]
			return have[len(have)-1]
		}
		if v.used+n <= v.most {
			v.used += n
			return make([]byte, n)
		}
		oldest := v.recent.Front()
		switch {
		case len(v.spare) > 0: // of other sizes
			for size, have := range v.spare {
				v.used -= size * len(have)
			}
			clear(v.spare)
		case oldest != nil && n <= v.most:
			v.evicted++
			v.remove(oldest)
		default:
			return nil
		}
	}
}

// drop gives back what was taken.
func (v *values) drop(data []byte) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.free(data)
}

func (v *values) free(data []byte) {
	if len(data) > 0 {
		v.spare[len(data)] = append(v.spare[len(data)], data)
	}
}

// keep stores what was taken and filled, in place of what the key had.
func (v *values) keep(key string, content Content, data []byte) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if old, ok := v.byKey[key]; ok {
		v.remove(old)
	}
	v.byKey[key] = v.recent.PushBack(&value{key: key, content: content, data: data})
}

// forget removes what a key has.
func (v *values) forget(key string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if old, ok := v.byKey[key]; ok {
		v.remove(old)
	}
}

// remove takes a value out. Its memory is free once nobody reads it.
func (v *values) remove(e *list.Element) {
	gone := v.recent.Remove(e).(*value)
	delete(v.byKey, gone.key)
	if gone.left = true; gone.readers == 0 {
		v.free(gone.data)
	}
}

// open returns what a key has, to be closed; nil when it has nothing.
func (v *values) open(key string) *value {
	v.mu.Lock()
	defer v.mu.Unlock()
	e, ok := v.byKey[key]
	if !ok {
		return nil
	}
	v.recent.MoveToBack(e)
	found := e.Value.(*value)
	found.readers++
	return found
}

func (v *values) close(read *value) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if read.readers--; read.readers == 0 && read.left {
		v.free(read.data)
	}
}

// has reports whether a key has a value. That is no use of it: a sweep asks for all.
func (v *values) has(key string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, ok := v.byKey[key]
	return ok
}

func (v *values) stats() (keys, bytes int, evicted uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.byKey), v.used, v.evicted
}
