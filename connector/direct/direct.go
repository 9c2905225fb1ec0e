// Package direct is the scheduler's half of connectors in which a consumer's engine gets blocks from a producer's, with no
// store between them. The producer keeps a finished request's blocks under a lease until they were fetched (vLLM's
// NixlConnector, pull_scheduler.py and base_scheduler.py).
package direct

// Metadata is what the half tells its workers in a step.
type Metadata struct {
	Holds   []Hold   // to a producer's worker
	Loads   []Load   // to a consumer's worker
	Notices []Remote // blocks that are not needed: all were there
	Cancels []string // loads of requests that were aborted
}

// Empty reports whether there is nothing to do.
func (m *Metadata) Empty() bool {
	return len(m.Holds)+len(m.Loads)+len(m.Notices)+len(m.Cancels) == 0
}

// Hold says that a request's blocks are complete, and kept for a consumer from now on.
type Hold struct {
	Request string
	Blocks  []int
}

// Load says which blocks are to be fetched: remote block i goes to local block i.
type Load struct {
	Request string
	First   int   // of the request's blocks, the first one that is fetched
	Local   []int // of this engine
	Blocks  []int // of the remote engine
	Remote  Remote
}

// Remote is a request at the engine that holds its blocks.
type Remote struct {
	EngineID string   // a restarted engine has another
	Instance string   // its name, for events
	Request  string   // its id there
	Ranks    []string // host:port of each rank's worker
	Push     bool     // ask before the producer has finished, and have it send when it has
}

// Handshake is what a worker tells its scheduler's half, which puts it into the hand-off.
type Handshake struct {
	Address string `json:"address"` // host:port where peers reach the worker
}
