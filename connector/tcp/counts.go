package tcp

import "sync/atomic"

type counts struct {
	copied, read, served, waited, refused, reconnects atomic.Uint64
}

// Counts are what an endpoint did since it was made.
type Counts struct {
	Copied     uint64 // fetches out of shared memory
	Read       uint64 // fetches over connections
	Served     uint64 // reads answered with payload
	Waited     uint64 // reads and opens that waited for a request
	Refused    uint64 // connections of peers that were turned away
	Reconnects uint64 // connections made anew because one broke in a fetch
	Waiting    int    // reads and opens that wait now
	Serving    int    // connections of peers
}

// Counts returns what the endpoint did.
func (e *Endpoint) Counts() Counts {
	c := Counts{
		Copied: e.counts.copied.Load(), Read: e.counts.read.Load(), Served: e.counts.served.Load(), Waited: e.counts.waited.Load(),
		Refused: e.counts.refused.Load(), Reconnects: e.counts.reconnects.Load(),
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	c.Waiting, c.Serving = e.waiting, len(e.conns)
	return c
}
