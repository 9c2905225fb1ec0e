// Package workload makes the work that the benchmark gives to ours and to its peers: deterministic, and the same for all.
package workload

// Random is splitmix64: what the recorded figures of the Go peers were made with.
type Random struct{ state uint64 }

// NewRandom returns the generator that begins at a seed.
func NewRandom(seed uint64) *Random { return &Random{state: seed} }

// Next returns the next 64 bits.
func (r *Random) Next() uint64 {
	r.state += 0x9e3779b97f4a7c15
	return Mix(r.state)
}

// Token returns a token id of the vocabulary that the messages speak in.
func (r *Random) Token() uint32 { return uint32(r.Next() % vocabulary) }

const vocabulary = 151_936

// Mix is splitmix64's output function, a permutation of 64 bits.
func Mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
