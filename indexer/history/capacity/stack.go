package capacity

// Stack follows what was asked for, and knows what a cache of any size would have hit under LRU. It is not safe for
// concurrent use.
type Stack struct {
	cfg Config
	sampler
	recent  recency
	hist    histogram
	asked   Count
	request []Block // the blocks of one request that are looked at
}

// NewStack returns a stack that has seen nothing.
func NewStack(cfg Config) (*Stack, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Stack{cfg: cfg, recent: newRecency()}
	s.set(cfg.Shift)
	return s, nil
}

// Request takes the blocks of a request in the order of its prompt, or of a part of it whose beginning is known to be hit.
// It keeps nothing of the slice. A block that is named twice is asked for twice.
func (s *Stack) Request(blocks []Block) {
	s.asked.Blocks += uint64(len(blocks))
	s.request = s.request[:0]
	for i := range blocks {
		s.asked.Tokens += uint64(blocks[i].Tokens)
		if s.looksAt(blocks[i].Hash) {
			s.request = append(s.request, blocks[i])
		}
	}
	if len(s.request) == 0 {
		return
	}
	s.look()
	if s.cfg.Order == PromptOrder {
		for i := range s.request {
			s.recent.touch(s.request[i].Hash)
		}
	} else {
		for i := len(s.request) - 1; i >= 0; i-- {
			s.recent.touch(s.request[i].Hash)
		}
	}
	for s.recent.n > s.cfg.MaxBlocks {
		s.set(s.shift + 1)
		s.recent.keep(s.looksAt)
		s.hist.halve()
	}
}

// look counts the blocks of a request by distance. A block is hit only with all before it, and so is never nearer than one
// of those.
func (s *Stack) look() {
	distance := 0
	for i := range s.request {
		if distance != never {
			if p := s.recent.find(s.request[i].Hash); p.slot == 0 {
				distance = never
			} else {
				distance = max(distance, s.recent.newer(p))
			}
		}
		s.hist.add(distance, s.request[i].Tokens)
	}
}

// Elsewhere adds blocks that were asked for, and that somebody else found not to be in the sample.
func (s *Stack) Elsewhere(c Count) {
	s.asked.Blocks += c.Blocks
	s.asked.Tokens += c.Tokens
}

// Curve returns what was found so far. What the sample has too much or too little of all that was asked for is taken for
// touches of the blocks that are asked for most, which any size hits (SHARDS' correction of the first bucket).
func (s *Stack) Curve() *Curve {
	return newCurve(&s.hist, s.shift, s.asked, true)
}
