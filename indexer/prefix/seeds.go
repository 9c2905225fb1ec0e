package prefix

import "kvstrata/event"

// maxSeeds bounds the seeds that are remembered of a model.
const maxSeeds = 256

// seed is one under which blocks of a model were hashed, sealed as it travels, and the adapter that was told with it.
type seed struct {
	sealed uint64
	lora   string
	known  bool // lora was told with it
}

// seeds are the distinct seeds of a model. Beyond the bound the oldest is forgotten.
type seeds struct {
	list []seed
	last int // the one noted last
}

// note enters a seed; lora is the adapter that was told with it, empty also where none was.
func (s *seeds) note(sealed uint64, lora string) {
	if s.last < len(s.list) && s.list[s.last].sealed == sealed {
		return
	}
	for i := range s.list {
		if s.list[i].sealed == sealed {
			s.last = i
			if lora != "" {
				s.list[i].lora, s.list[i].known = lora, true
			}
			return
		}
	}
	if len(s.list) == maxSeeds {
		s.list = append(s.list[:0], s.list[1:]...)
	}
	s.list = append(s.list, seed{sealed: sealed, lora: lora, known: lora != ""})
	s.last = len(s.list) - 1
}

// noteEntry enters the seed of a checkpoint's entry, which tells no adapter.
func (s *seeds) noteEntry(e *event.Entry) {
	if e.Seed != 0 {
		s.note(e.Seed, "")
	}
}
