package capacity

// Victims follows what an engine told: blocks stored, and evicted. Engines tell of no hits, and what a smaller cache would
// have hit is not known. But of a larger one it is known what it would have hit beside: if it evicts in the same order, it
// holds what the engine holds and, of the blocks that left and did not come back, those that left last. A block that is stored
// again would have been hit by a cache that is larger by it and by the blocks that left since.
//
// An engine evicts what it needs for a step, then stores: what is told together counts as told at once, and the room that a
// request needs does not count against it.
//
// It is not safe for concurrent use.
type Victims struct {
	cfg Config
	sampler
	gone   recency // by when they were evicted
	now    int     // of these, those that were evicted at once with what is told now: the newest
	hist   histogram
	stored Count
	run    []Block
}

// NewVictims returns the victims of an engine that told nothing yet.
func NewVictims(cfg Config) (*Victims, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	v := &Victims{cfg: cfg, gone: newRecency()}
	v.set(cfg.Shift)
	return v, nil
}

// Stored takes a run of blocks that were stored together, in the order of their prompt. It keeps nothing of the slice.
func (v *Victims) Stored(run []Block) {
	v.stored.Blocks += uint64(len(run))
	v.run = v.run[:0]
	for i := range run {
		v.stored.Tokens += uint64(run[i].Tokens)
		if v.looksAt(run[i].Hash) {
			v.run = append(v.run, run[i])
		}
	}
	distance := 0
	for i := range v.run {
		if distance != never {
			distance = max(distance, v.since(v.run[i].Hash))
		}
		v.hist.add(distance, v.run[i].Tokens)
	}
	for i := range v.run {
		p := v.gone.find(v.run[i].Hash)
		if p.slot == 0 {
			continue
		}
		if v.gone.newer(p) < v.now {
			v.now--
		}
		v.gone.remove(p.hash)
	}
}

// since returns how many blocks left since one did, before what is told now; never where it did not.
func (v *Victims) since(hash uint64) int {
	p := v.gone.find(hash)
	if p.slot == 0 {
		return never
	}
	newer := v.gone.newer(p)
	if newer >= v.now {
		newer -= v.now
	}
	return newer
}

// Evicted takes a block of which the last copy left.
func (v *Victims) Evicted(hash uint64) {
	if !v.looksAt(hash) {
		return
	}
	if p := v.gone.find(hash); p.slot == 0 || v.gone.newer(p) >= v.now {
		v.now++
	}
	v.gone.touch(hash)
}

// Done says that what was told since the last call was told at once.
func (v *Victims) Done() {
	v.now = 0
	for v.gone.n > v.cfg.MaxBlocks {
		v.set(v.shift + 1)
		v.gone.keep(v.looksAt)
		v.hist.halve()
	}
}

// Cleared says that the engine lost everything: no cache would have kept what left before.
func (v *Victims) Cleared() {
	v.gone.clear()
	v.now = 0
}

// Elsewhere adds blocks that were stored, and that somebody else found not to be in the sample.
func (v *Victims) Elsewhere(c Count) {
	v.stored.Blocks += c.Blocks
	v.stored.Tokens += c.Tokens
}

// Curve returns, by how many blocks the cache is larger, which of the blocks that were stored would have been hit instead.
func (v *Victims) Curve() *Curve {
	return newCurve(&v.hist, v.shift, v.stored, false)
}
