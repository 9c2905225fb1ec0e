package connector

// Op is what a transfer did.
type Op uint8

// The operations.
const (
	Load Op = 1 + iota // from outside into this engine's blocks
	Save               // from this engine's blocks to a store
)

// Done is one transfer that ended, as one rank saw it.
type Done struct {
	Op      Op
	Request string
	First   int    // of the request's blocks, the first one that was moved
	Blocks  int    // how many
	Bad     []int  // of a save: those of them that the store did not take, counted from First
	Peer    string // where the bytes came from or went

	Transfer       // Bytes are those that were moved
	Err      error // nil = all of them were
}

// Report is the worker metadata of this module's transports: the transfers that ended in a step.
type Report struct {
	Done    []Done
	Expired []string // requests whose lease ran out
}

var _ WorkerMetadata = (*Report)(nil)

// Aggregate appends another rank's.
func (r *Report) Aggregate(other WorkerMetadata) WorkerMetadata {
	if o, ok := other.(*Report); ok {
		r.Done, r.Expired = append(r.Done, o.Done...), append(r.Expired, o.Expired...)
	}
	return r
}
