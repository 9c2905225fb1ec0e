package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// tallied are the faults of one kind.
type tallied struct {
	kind           kind
	done, missed   int
	longest, whole time.Duration // from the fault's end, and from its beginning, until everything flowed again
	worst          string
}

// tally counts faults by kind.
func tally(done []*injury) (all []tallied) {
	for _, i := range done {
		at := slices.IndexFunc(all, func(t tallied) bool { return t.kind == i.Kind })
		if at < 0 {
			at = len(all)
			all = append(all, tallied{kind: i.Kind})
		}
		t := &all[at]
		if i.missed != "" {
			t.missed++
			continue
		}
		t.done++
		if i.well.IsZero() {
			continue
		}
		if after := i.well.Sub(i.ended); after > t.longest || t.worst == "" {
			t.longest, t.worst = after, i.fault.String()
		}
		t.whole = max(t.whole, i.well.Sub(i.began))
	}
	slices.SortFunc(all, func(a, b tallied) int { return cmp.Compare(a.kind, b.kind) })
	return all
}

// report prints the figures.
func (c *chaos) report(w io.Writer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var sum tallied
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\n  fault\tdone\tnot done\tlongest recovery\tfrom the fault's beginning\tof")
	for _, k := range tally(c.done) {
		fmt.Fprintf(t, "  %s\t%d\t%d\t%s\t%s\t%s\n", k.kind, k.done, k.missed, seconds(k.longest), seconds(k.whole), k.worst)
		sum.done, sum.missed = sum.done+k.done, sum.missed+k.missed
		if k.longest > sum.longest {
			sum.longest, sum.worst = k.longest, k.worst
		}
		sum.whole = max(sum.whole, k.whole)
	}
	fmt.Fprintf(t, "  all\t%d\t%d\t%s\t%s\t%s\n", sum.done, sum.missed, seconds(sum.longest), seconds(sum.whole), sum.worst)
	_ = t.Flush() // to a terminal or a file

	var all finding
	if n := len(c.quiet); n > 0 {
		fmt.Fprintln(t, "\n  engine\tlives\tbatches\tevents\tresident\tkept back\tof these came\tlost\tunknown tail\ttold again\tdigests differed\tdouble")
		for _, e := range c.fleet.engines {
			f := c.quiet[n-1][e.name]
			fmt.Fprintf(t, "  %s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", e.name, e.process.lives(), f.Batches, f.Blocks, f.Resident, f.Withheld,
				f.Recovered, f.Lost, f.Tail, f.ToldAgain, f.Differed, f.Double)
			all.Batches, all.Blocks, all.Lost, all.Double = all.Batches+f.Batches, all.Blocks+f.Blocks, all.Lost+f.Lost, all.Double+f.Double
		}
		_ = t.Flush()
	}
	fmt.Fprintf(w, "\n  faults survived   %d in %d storms\n", sum.done, c.storms)
	fmt.Fprintf(w, "  events            %d blocks stored and evicted, in %d batches, each compared with its engine's own word\n", all.Blocks, all.Batches)
	fmt.Fprintf(w, "  lost              %d batches, all in the ledger\n", all.Lost)
	fmt.Fprintf(w, "  double-counted    %d\n", all.Double)
	fmt.Fprintf(w, "  longest recovery  %s (%s); from the beginning of a fault %s\n", seconds(sum.longest), sum.worst, seconds(sum.whole))
	fmt.Fprintf(w, "  requests          %d served, %d not\n", c.traffic.served.Load(), c.traffic.failed.Load())
	if c.noDisk != nil {
		fmt.Fprintln(w, "  NOT DONE          full disks: they take root, and a machine that lets it mount")
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }
