package main

import (
	"cmp"
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/prefix"
	"kvstrata/sim"
)

// report waits until the index and history have everything that the engines published, compares block for block, and
// prints what happened. A difference wraps errMismatch.
func (c *demoCmd) report(ctx context.Context, a *app, d *demoEngines, view fleetView, kept *history.Reader, r sim.Report) error {
	simulated := time.Now()
	if err := d.awaitIndex(ctx, view); err != nil {
		return err
	}
	visible := r.Elapsed + time.Since(simulated)
	if err := d.awaitHistory(ctx, kept); err != nil {
		return err
	}
	wall := r.Elapsed + time.Since(simulated)
	stories, sum, err := d.tell(ctx)
	if err != nil {
		return err
	}
	ops := sum.BlocksStored + sum.BlocksEvicted
	fmt.Fprintf(a.stdout, "\n%d requests in %v\n", r.Requests, wall.Round(time.Millisecond))
	fmt.Fprintf(a.stdout, "  hash ids      %d of %d were hits (%s)\n", r.HashIDHits, r.HashIDs, percent(r.HashIDHits, r.HashIDs, 3))
	var lookups, hits uint64
	for _, story := range stories[:len(d.prefill)] {
		lookups, hits = lookups+story.Stats.BlockLookups, hits+story.Stats.BlockHits
	}
	fmt.Fprintf(a.stdout, "  blocks        %d of %d full %d-token blocks were hits (%s)\n", hits, lookups, c.BlockSize, percent(hits, lookups, 2))
	fmt.Fprintf(a.stdout, "  stored        %d blocks, evicted %d, loaded %d, in %d batches\n", sum.BlocksStored, sum.BlocksEvicted, sum.BlocksLoaded, sum.Published)
	fmt.Fprintf(a.stdout, "  block events  %.0f/s through NATS to the index, %.0f/s to history\n\n", float64(ops)/visible.Seconds(), float64(ops)/wall.Seconds())

	infos, err := view.sources(ctx)
	if err != nil {
		return fmt.Errorf("ask the index for its sources: %w", err)
	}
	w := tabwriter.NewWriter(a.stdout, 2, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  engine\tsimulator\tindex\thistory\tdifferent\tstored, evicted\tstate\tledger\tdigests")
	different := 0
	for i, e := range d.all() {
		diff, err := compare(ctx, e, &stories[i], d.configs[i].Source, view, kept, infos)
		if err != nil {
			return err
		}
		different += diff.different
		fmt.Fprintf(w, "  %s\t%d blocks\t%d blocks\t%d blocks\t%d\t%s\t%s\t%s\t%s\n", e.Name(), diff.simulator, diff.index, diff.history,
			diff.different, diff.totals, diff.state, diff.ledger, diff.digests)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if sum.Refused > 0 {
		fmt.Fprintf(a.stdout, "  %d requests did not fit an engine's pool and were refused\n", sum.Refused)
	}
	if err := d.checkTransfers(ctx, a); err != nil {
		return err
	}
	if different > 0 {
		return fmt.Errorf("%w: %d blocks or totals differ between the engines, the index and history", errMismatch, different)
	}
	fmt.Fprintln(a.stdout, "  every engine's resident set and totals are the same in the simulator, in the index and in history, block for block")
	return nil
}

func percent(n, of uint64, digits int) string {
	if of == 0 {
		return "none asked"
	}
	return fmt.Sprintf("%.*f %%", digits, 100*float64(n)/float64(of))
}

// settleTime is how long index and history may take for the last batches without getting on.
const settleTime = time.Minute

// await waits until every engine's source stands where its engine does. far says how far one stands, and whether all is
// said of it.
func (d *demoEngines) await(ctx context.Context, who string, far func(event.Source) (batches uint64, settled bool, err error)) error {
	stories, _, err := d.tell(ctx)
	if err != nil {
		return err
	}
	for i := range stories {
		source, published := d.configs[i].Source, stories[i].Published
		deadline, before := time.Now().Add(settleTime), uint64(0)
		for published > 0 {
			batches, settled, err := far(source)
			if batches >= published && settled && err == nil {
				break
			}
			if batches > before {
				before, deadline = batches, time.Now().Add(settleTime)
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("%w: %s stands at %d batches of %v, the engine published %d (%v)", errMismatch, who, batches, source,
					published, cmp.Or(err, ctx.Err()))
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

func (d *demoEngines) awaitIndex(ctx context.Context, view fleetView) error {
	return d.await(ctx, "the index", func(source event.Source) (uint64, bool, error) {
		infos, err := view.sources(ctx)
		if err != nil {
			return 0, false, err
		}
		for _, info := range infos {
			if info.Source == source && info.Started {
				told := info.Ledger.Started && info.Ledger.Last >= info.LastSeq && info.State != event.StateRecovering
				return uint64(info.LastSeq) + 1, told, nil
			}
		}
		return 0, false, nil
	})
}

func (d *demoEngines) awaitHistory(ctx context.Context, kept *history.Reader) error {
	return d.await(ctx, "history", func(source event.Source) (uint64, bool, error) {
		m, err := kept.Mark(ctx, source)
		if err != nil || !m.Started {
			return 0, false, err
		}
		return uint64(m.Seq) + 1, true, nil
	})
}

// difference is how an engine's blocks compare in the simulator, the index and history.
type difference struct {
	simulator, index, history, different int
	totals, state, ledger, digests       string
}

// compare holds every entry of the engine's resident set against those of the index and of history, copies included, and
// the totals that each counted.
func compare(ctx context.Context, e demoEngine, story *engineStory, source event.Source, view fleetView, kept *history.Reader, infos []prefix.SourceInfo) (difference, error) {
	d := difference{totals: "equal", state: "unknown", ledger: "none", digests: "none"}
	want := make(map[blockKey]int)
	folded := make(map[history.Resident]int) // history has hashes of 64 bits
	for k, copies := range e.Blocks(ctx) {
		want[blockKey{k.Hash, k.Tier, k.Group.Index()}] = copies
		folded[history.Resident{Hash: history.Fold(k.Hash), Tier: k.Tier, Group: event.Group(k.Group.Index())}] += copies
		d.simulator++
	}
	err := view.resident(ctx, source, func(k blockKey, copies int) {
		d.index++
		if want[k] != copies {
			d.different++
		}
		delete(want, k)
	})
	if err != nil {
		return d, fmt.Errorf("ask the index for the blocks of %v: %w", source, err)
	}
	err = kept.Resident(ctx, source, func(b history.Resident) {
		d.history++
		k := history.Resident{Hash: b.Hash, Tier: b.Tier, Group: event.Group(b.Group.Index())}
		if folded[k] != int(b.Copies) {
			d.different++
		}
		delete(folded, k)
	})
	if err != nil {
		return d, fmt.Errorf("ask history for the blocks of %v: %w", source, err)
	}
	d.different += len(want) + len(folded)
	totals, err := kept.Totals(ctx, source)
	if err != nil {
		return d, fmt.Errorf("ask history for the totals of %v: %w", source, err)
	}
	stats := story.Stats
	for _, info := range infos {
		if info.Source != source {
			continue
		}
		d.state = info.State.String()
		d.ledger = map[bool]string{true: "adds up", false: "DOES NOT ADD UP"}[info.Balanced]
		d.digests = fmt.Sprintf("%d agreed, %d differed", info.Digest.Agreed, info.Digest.Differed)
		if info.Totals.Stored != stats.BlocksStored || info.Totals.Evicted != stats.BlocksEvicted ||
			totals.Stored != stats.BlocksStored || totals.Evicted != stats.BlocksEvicted {
			d.different++
			d.totals = fmt.Sprintf("%d/%d/%d, %d/%d/%d DIFFER", stats.BlocksStored, info.Totals.Stored, totals.Stored,
				stats.BlocksEvicted, info.Totals.Evicted, totals.Evicted)
		}
	}
	return d, nil
}
