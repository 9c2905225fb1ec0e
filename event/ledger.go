package event

import "slices"

// MaxHoles bounds the holes that a [Ledger] lists; older ones stay in its counts.
const MaxHoles = 64

// Ledger accounts for every sequence of one life of one source, and for every reception.
//
//	Last − First + 1 = Live + Recovered + Held + Asked + Lost
//	Receptions       = Live + Recovered + Held + Asked + Duplicates + Malformed
//
// Dropped publishes are counted beside it: they were received and judged, but never reached the bus. What a killed
// life sent after its Last is unknown, and never invented.
type Ledger struct {
	Started bool `json:"started"` // whether First and Last mean anything
	First   Seq  `json:"first"`
	Last    Seq  `json:"last"` // highest received or published

	Live      uint64 `json:"live"`
	Recovered uint64 `json:"recovered"`
	Held      uint64 `json:"held"`
	Asked     uint64 `json:"asked"`
	Lost      uint64 `json:"lost"`

	Duplicates uint64 `json:"duplicates"`
	Malformed  uint64 `json:"malformed"`
	Dropped    uint64 `json:"dropped"`

	Holes []Hole `json:"holes,omitempty"` // the newest MaxHoles
}

// Hole is a range of sequences whose batches never came.
type Hole struct {
	First  Seq    `json:"first"`
	Last   Seq    `json:"last"`
	Reason string `json:"reason"`
}

// Count enters a batch by its way; a Dropped one is entered beside the sequences, which its earlier reception counted.
func (l *Ledger) Count(b *Batch) {
	n := uint64(b.Last-b.First) + 1
	if b.Way == Dropped {
		l.Dropped += n
		l.hole(b)
		return
	}
	if !l.Started {
		l.Started, l.First = true, b.First
	}
	l.Last = max(l.Last, b.Last)
	switch b.Way {
	case Live:
		l.Live += n
	case Recovered:
		l.Recovered += n
	case Held:
		l.Held += n
	case Asked:
		l.Asked += n
	case Lost:
		l.Lost += n
		l.hole(b)
	}
}

func (l *Ledger) hole(b *Batch) {
	if len(l.Holes) == MaxHoles {
		l.Holes = slices.Delete(l.Holes, 0, 1)
	}
	l.Holes = append(l.Holes, Hole{First: b.First, Last: b.Last, Reason: b.Reason})
}

// Receptions returns how many batches were received, those of no use included.
func (l *Ledger) Receptions() uint64 {
	return l.Live + l.Recovered + l.Held + l.Asked + l.Duplicates + l.Malformed
}

// Balanced reports whether every sequence from First to Last is accounted for.
func (l *Ledger) Balanced() bool {
	sum := l.Live + l.Recovered + l.Held + l.Asked + l.Lost
	if !l.Started {
		return sum == 0
	}
	return uint64(l.Last-l.First)+1 == sum
}

// MaxPastLives bounds how many lives of a source are remembered after their end.
const MaxPastLives = 8

// PastLife is what is remembered of a life that has ended.
type PastLife struct {
	Epoch       Epoch  `json:"epoch"`
	Ledger      Ledger `json:"ledger"`       // without the list of its holes
	TailUnknown bool   `json:"tail_unknown"` // it may have sent more after Ledger.Last: an engine does not tell its end
}

// Bury appends a life that ended to those before it, oldest first. One of which no batch was heard leaves nothing behind.
func Bury(lives []PastLife, l PastLife) []PastLife {
	if !l.Ledger.Started {
		return lives
	}
	l.Ledger.Holes = nil
	lives = append(slices.Clone(lives), l)
	return lives[max(0, len(lives)-MaxPastLives):]
}

// Clone returns a ledger that shares nothing with l.
func (l *Ledger) Clone() Ledger {
	c := *l
	c.Holes = slices.Clone(l.Holes)
	return c
}
