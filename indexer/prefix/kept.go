package prefix

import "kvstrata/event"

// kept are prefixes that are asked for by themselves, not by a prompt that leads to them: their blocks are in the table wherever they
// lie. It is a filter, which has some others, too.
type kept []uint64

const keptBits = 1 << 17

func (k kept) has(p event.PrefixHash) bool {
	return len(k) > 0 && k[p%keptBits/64]>>(p%64)&1 != 0
}

func (k *kept) add(p event.PrefixHash) {
	if len(*k) == 0 {
		*k = make(kept, keptBits/64)
	}
	(*k)[p%keptBits/64] |= 1 << (p % 64)
}

// keep has a block found by its prefix alone from now on, also when it leaves and is stored again.
func (f *forest) keep(p event.PrefixHash, id uint32) {
	f.kept.add(p)
	if f.prefix(id) == p {
		f.anchor(id)
		return
	}
	f.find(p, unknownBefore) // it left in the batch that continued it, and may be back
}
