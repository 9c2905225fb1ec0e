package bus

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"kvstrata/event"
)

const subjectRoot = "kv.v1."

// Kind is the third token of a subject: what a message is about.
type Kind string

// The kinds.
const (
	Events   Kind = "ev"       // judged batches
	Status   Kind = "status"   // what a source's publisher says of it
	Transfer Kind = "transfer" // leases, failures and records of transfers
	Lookup   Kind = "lookup"   // what was asked of an index, and found
	GPU      Kind = "gpu"      // samples of devices
	Control  Kind = "ctl"      // requests to a source's publisher, on core NATS
)

// Subject returns kv.v1.<kind>.<cluster>.<model>.<instance>.<dp_rank>.<origin>.
func Subject(kind Kind, source event.Source) string {
	return subjectRoot + string(kind) + "." + source.Tokens()
}

// allConnectors is the subject of the events of all connectors of a cluster's model.
func allConnectors(cluster, model string) string {
	tokens := strings.Split(Subject(Events, event.Source{Cluster: cluster, Model: model, Instance: "i", Origin: event.Connector}), ".")
	n := len(tokens)
	tokens[n-3], tokens[n-2] = "*", "*" // instance and dp_rank
	return strings.Join(tokens, ".")
}

// ParseSubject reads what Subject wrote.
func ParseSubject(subject string) (Kind, event.Source, error) {
	rest, ok := strings.CutPrefix(subject, subjectRoot)
	kind, tokens, found := strings.Cut(rest, ".")
	if !ok || !found {
		return "", event.Source{}, fmt.Errorf("subject %q: want %s<kind>.<source>", subject, subjectRoot)
	}
	source, err := event.ParseSource(tokens)
	if err != nil {
		return "", event.Source{}, fmt.Errorf("subject %q: %w", subject, err)
	}
	return Kind(kind), source, nil
}

// Headers of a message of kind ev, all decimal, so that a consumer can skip what it knows without decoding.
const (
	headerEpoch  = "Kv-Epoch"
	headerFirst  = "Kv-First"  // first sequence
	headerLast   = "Kv-Last"   // last sequence
	headerBlocks = "Kv-Blocks" // block operations
	headerFence  = "Kv-Fence"
	headerDigest = "Kv-Digest" // of the resident set after Kv-Last; on the first message of each second
)

// Head is what a message's headers say.
type Head struct {
	Epoch       event.Epoch
	Fence       event.Fence
	First, Last event.Seq
	Blocks      int
	Digest      event.Digest
	HasDigest   bool
}

// Header returns the head as message headers.
func (h Head) Header() nats.Header {
	header := nats.Header{
		headerEpoch:  {strconv.FormatUint(uint64(h.Epoch), 10)},
		headerFirst:  {strconv.FormatUint(uint64(h.First), 10)},
		headerLast:   {strconv.FormatUint(uint64(h.Last), 10)},
		headerBlocks: {strconv.Itoa(h.Blocks)},
		headerFence:  {strconv.FormatUint(uint64(h.Fence), 10)},
	}
	if h.HasDigest {
		header[headerDigest] = []string{strconv.FormatUint(uint64(h.Digest), 10)}
	}
	return header
}

// ParseHead reads what Head.Header wrote.
func ParseHead(header nats.Header) (Head, error) {
	var h Head
	var err error
	number := func(name string) uint64 {
		v, e := strconv.ParseUint(header.Get(name), 10, 64)
		if e != nil && err == nil {
			err = fmt.Errorf("header %s %q: want a number", name, header.Get(name))
		}
		return v
	}
	h.Epoch = event.Epoch(number(headerEpoch))
	h.Fence = event.Fence(number(headerFence))
	h.First, h.Last = event.Seq(number(headerFirst)), event.Seq(number(headerLast))
	h.Blocks = int(min(number(headerBlocks), 1<<31))
	if _, h.HasDigest = header[headerDigest]; h.HasDigest {
		h.Digest = event.Digest(number(headerDigest))
	}
	if err == nil && h.Last < h.First {
		err = fmt.Errorf("header %s %d: before %s %d", headerLast, h.Last, headerFirst, h.First)
	}
	return h, err
}
