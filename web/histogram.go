package web

import (
	"math"
	"math/bits"
	"time"
)

// A histogram has a bucket for each eighth of an octave from 1 µs to 18 minutes, one for what is shorter, and one for what
// is longer. Its size is fixed, whatever it is told.
const (
	eighths       = 3  // bits of an octave
	shortestPower = 10 // of two, in nanoseconds
	longestPower  = 40
	lastBucket    = (longestPower-shortestPower)<<eighths + 1
)

// histogram counts durations.
type histogram [lastBucket + 1]uint32

func (h *histogram) count(d time.Duration) { h[bucketOf(d)]++ }

func (h *histogram) add(other *histogram) {
	for i, n := range other {
		h[i] += n
	}
}

// quantile returns what at least this share of the durations does not exceed: the end of its bucket, which is at most an
// eighth, or 1 µs, above it. The histogram holds something.
func (h *histogram) quantile(share float64) time.Duration {
	var total uint64
	for _, n := range h {
		total += uint64(n)
	}
	rank := max(1, uint64(math.Ceil(share*float64(total))))
	for i, n := range h {
		if rank <= uint64(n) {
			return bucketEnd(i)
		}
		rank -= uint64(n)
	}
	panic("web: a rank beyond the histogram's count")
}

func bucketOf(d time.Duration) int {
	n := uint64(max(d, 0))
	power := bits.Len64(n) - 1
	switch {
	case power < shortestPower:
		return 0
	case power >= longestPower:
		return lastBucket
	}
	return 1 + (power-shortestPower)<<eighths + int(n>>(power-eighths)&(1<<eighths-1))
}

// bucketEnd is above every duration of a bucket.
func bucketEnd(i int) time.Duration {
	switch i {
	case 0:
		return 1 << shortestPower
	case lastBucket:
		return math.MaxInt64
	}
	power, part := shortestPower+(i-1)>>eighths, (i-1)&(1<<eighths-1)
	return time.Duration(1<<eighths+part+1) << (power - eighths)
}
