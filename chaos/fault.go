package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// kind is one way of doing harm.
type kind string

// The kinds. Those of processes name theirs as the target, those of the proxies an engine.
const (
	killProcess  kind = "kill"          // SIGKILL; it is started again at once
	stopProcess  kind = "stop"          // SIGSTOP, and SIGCONT after For
	restart      kind = "restart"       // SIGTERM; it is started again at once
	loseNATS     kind = "lose-nats"     // SIGKILL, and its store is gone when it is back
	killInsert   kind = "kill-insert"   // the ClickHouse child, SIGKILL during an insert
	fillDisk     kind = "fill-disk"     // ClickHouse's has no room For
	dropFrames   kind = "drop"          // N batches of the live socket
	loseFrames   kind = "lose"          // N batches that no replay brings either
	dupFrames    kind = "duplicate"     // N batches
	swapFrames   kind = "reorder"       // N pairs of neighbours
	holdFrames   kind = "delay"         // of the live socket, For
	cutSockets   kind = "cut"           // both sockets' connections
	cutReplay    kind = "cut-replay"    // a replay's connection, after N batches of it
	silentReplay kind = "silent-replay" // replies are swallowed For
	outage       kind = "outage"        // nobody gets through to the engine For
)

// fault is one harm: what, whom, when and how long.
type fault struct {
	At     time.Duration // since the storm began
	Kind   kind
	Target string
	For    time.Duration
	N      int
}

func (f fault) String() string {
	text := fmt.Sprintf("%s %s", f.Kind, f.Target)
	if f.For > 0 {
		text += fmt.Sprintf(" for %v", f.For)
	}
	if f.N > 0 {
		text += fmt.Sprintf(", %d", f.N)
	}
	return text
}

// plots are what a schedule is drawn from: a kind with the targets that it has, and its weight.
type plot struct {
	kind    kind
	targets []string
	weight  int
}

// Names of the processes, beside the engines'.
const (
	natsName       = "nats"
	indexName      = "index"
	historyName    = "history"
	clickhouseName = "clickhouse" // history's child
)

var subscriberNames = []string{"subscriber-a", "subscriber-b"}

// plots returns everything that can be done to so many engines. Whether the disk can be filled depends on the machine.
func plots(engines []string, disk bool) []plot {
	processes := slices.Concat(subscriberNames, []string{indexName, historyName, natsName}, engines)
	all := []plot{
		{killProcess, processes, 6},
		{stopProcess, append(processes, clickhouseName), 6},
		{restart, slices.Concat(subscriberNames, []string{indexName, historyName}, engines), 2},
		{loseNATS, []string{natsName}, 1},
		{killInsert, []string{clickhouseName}, 2},
		{fillDisk, []string{clickhouseName}, 1},
		{dropFrames, engines, 3},
		{loseFrames, engines, 1},
		{dupFrames, engines, 2},
		{swapFrames, engines, 2},
		{holdFrames, engines, 2},
		{cutSockets, engines, 2},
		{cutReplay, engines, 2},
		{silentReplay, engines, 1},
		{outage, engines, 2},
	}
	return slices.DeleteFunc(all, func(p plot) bool { return p.kind == fillDisk && !disk })
}

// only keeps the plots of some kinds; none named keeps all.
func only(all []plot, kinds []string) ([]plot, error) {
	if len(kinds) == 0 {
		return all, nil
	}
	kept := make([]plot, 0, len(kinds))
	for _, name := range kinds {
		at := slices.IndexFunc(all, func(p plot) bool { return string(p.kind) == name })
		if at < 0 {
			var names []string
			for _, p := range all {
				names = append(names, string(p.kind))
			}
			return nil, fmt.Errorf("--faults %q: want some of %s", name, strings.Join(names, ", "))
		}
		kept = append(kept, all[at])
	}
	return kept, nil
}

const (
	meanPause = 1500 * time.Millisecond // between two faults
	calm      = 2 * time.Second         // before the first
)

// schedule draws storms of a length each. It is a function of its arguments alone. As far as there is time, every kind has
// its turn before one has a second.
func schedule(seed uint64, storms int, length time.Duration, all []plot) [][]fault {
	random := rand.New(rand.NewPCG(seed, 0x6b76))
	var waiting []plot
	draw := func() plot {
		if waiting == nil {
			for _, i := range random.Perm(len(all)) {
				waiting = append(waiting, all[i])
			}
		}
		if len(waiting) > 0 {
			p := waiting[0]
			waiting = waiting[1:]
			return p
		}
		sum := 0
		for _, p := range all {
			sum += p.weight
		}
		at := random.IntN(sum)
		for _, p := range all {
			if at -= p.weight; at < 0 {
				return p
			}
		}
		panic("chaos: weights do not add up")
	}
	out := make([][]fault, storms)
	for i := range out {
		for at := calm; at < length; at += pauseOf(random) {
			p := draw()
			f := fault{At: at.Round(time.Millisecond), Kind: p.kind, Target: p.targets[random.IntN(len(p.targets))]}
			f.For, f.N = extent(random, f.Kind)
			out[i] = append(out[i], f)
		}
	}
	return out
}

func pauseOf(random *rand.Rand) time.Duration {
	return time.Duration(min(random.ExpFloat64(), 3) * float64(meanPause))
}

// extent draws how long a fault lasts, or how much it takes.
func extent(random *rand.Rand, k kind) (long time.Duration, n int) {
	between := func(least, most time.Duration) time.Duration {
		return (least + time.Duration(random.Int64N(int64(most-least)))).Round(time.Millisecond)
	}
	switch k {
	case stopProcess:
		return between(500*time.Millisecond, 8*time.Second), 0
	case fillDisk:
		return between(3*time.Second, 8*time.Second), 0
	case holdFrames:
		return between(500*time.Millisecond, 6*time.Second), 0
	case silentReplay:
		return between(2*time.Second, 20*time.Second), 0
	case outage:
		return between(time.Second, 10*time.Second), 0
	case dropFrames, dupFrames:
		return 0, 1 + random.IntN(30)
	case loseFrames, cutReplay:
		return 0, 1 + random.IntN(5)
	case swapFrames:
		return 0, 1 + random.IntN(10)
	default:
		return 0, 0
	}
}
