package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"kvstrata/event"
	"kvstrata/sim"
)

// report waits until the index has applied everything that the engines published, compares block for block, and prints
// what happened. A difference wraps errMismatch.
func (c *demoCmd) report(ctx context.Context, a *app, d *demoEngines, s *stack, r sim.Report) error {
	simulated := time.Now()
	if err := c.awaitIndex(ctx, d, s); err != nil {
		return err
	}
	wall := r.Elapsed + time.Since(simulated)
	ops := r.BlocksStored + r.BlocksEvicted
	fmt.Fprintf(a.stdout, "\n%d requests in %v\n", r.Requests, wall.Round(time.Millisecond))
	fmt.Fprintf(a.stdout, "  hash ids      %d of %d were hits (%s)\n", r.HashIDHits, r.HashIDs, percent(r.HashIDHits, r.HashIDs, 3))
	fmt.Fprintf(a.stdout, "  blocks        %d of %d full %d-token blocks were hits (%s)\n", r.BlockHits, r.Blocks, c.BlockSize, percent(r.BlockHits, r.Blocks, 2))
	fmt.Fprintf(a.stdout, "  stored        %d blocks, evicted %d, in %d batches\n", r.BlocksStored, r.BlocksEvicted, r.Batches)
	fmt.Fprintf(a.stdout, "  block events  %.0f/s through NATS to the index\n\n", float64(ops)/wall.Seconds())

	w := tabwriter.NewWriter(a.stdout, 2, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  engine\tsimulator\tindex\tdifferent\tstate\tledger\tdigests")
	different := 0
	for i, e := range d.all() {
		diff := s.compare(e, d.configs[i].Source)
		different += diff.different
		fmt.Fprintf(w, "  %s\t%d blocks\t%d blocks\t%d\t%s\t%s\t%s\n", e.Name(), diff.simulator, diff.index, diff.different,
			diff.state, diff.ledger, diff.digests)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if r.Refused > 0 {
		fmt.Fprintf(a.stdout, "  %d requests did not fit an engine's pool and were refused\n", r.Refused)
	}
	if different > 0 {
		return fmt.Errorf("%w: %d blocks differ between the engines and the index", errMismatch, different)
	}
	fmt.Fprintln(a.stdout, "  every engine's resident set is the same in the simulator and in the index, block for block")
	return nil
}

func percent(n, of uint64, digits int) string {
	if of == 0 {
		return "none asked"
	}
	return fmt.Sprintf("%.*f %%", digits, 100*float64(n)/float64(of))
}

// settleTime is how long the index may take for the last batches.
const settleTime = 30 * time.Second

func (c *demoCmd) awaitIndex(ctx context.Context, d *demoEngines, s *stack) error {
	deadline := time.Now().Add(settleTime)
	for i, socket := range d.sockets {
		for {
			_, seq, started := s.index.Seq(d.configs[i].Source)
			if socket.Seq() == 0 || started && uint64(seq)+1 >= socket.Seq() && s.told(d.configs[i].Source, seq) {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%w: the index stands at sequence %d of %v, the engine published %d batches", errMismatch,
					seq, d.configs[i].Source, socket.Seq())
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	return nil
}

// told reports whether the subscriber's last word on a source is of a sequence or later.
func (s *stack) told(source event.Source, seq event.Seq) bool {
	for _, info := range s.index.Sources() {
		if info.Source == source {
			return info.Ledger.Started && info.Ledger.Last >= seq && info.State != event.StateRecovering
		}
	}
	return false
}

// difference is how an engine's blocks and the index's compare.
type difference struct {
	simulator, index, different int
	state, ledger, digests      string
}

// compare holds every entry of the engine's resident set against the index, copies included.
func (s *stack) compare(e *sim.Engine, source event.Source) difference {
	var d difference
	type key struct {
		hash  event.BlockHash
		tier  event.Tier
		group uint32
	}
	want := make(map[key]int)
	for k, copies := range e.Resident() {
		want[key{k.Hash, k.Tier, k.Group.Index()}] = copies
		d.simulator++
	}
	for entry := range s.index.Resident(source) {
		d.index++
		k := key{entry.Hash, entry.Tier, entry.Group.Index()}
		if want[k] != int(entry.Copies) {
			d.different++
		}
		delete(want, k)
	}
	d.different += len(want)
	d.state, d.ledger, d.digests = "unknown", "none", "none"
	for _, info := range s.index.Sources() {
		if info.Source != source {
			continue
		}
		d.state = info.State.String()
		d.ledger = map[bool]string{true: "adds up", false: "DOES NOT ADD UP"}[info.Balanced]
		d.digests = fmt.Sprintf("%d agreed, %d differed", info.Digest.Agreed, info.Digest.Differed)
	}
	return d
}
