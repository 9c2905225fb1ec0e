package main

import (
	"os"
	"runtime/pprof"
	"runtime"
	"testing"
	"strconv"

	"kvstrata/bench/workload"
)

func TestProf(t *testing.T) {
	tr, err := workload.ReadTrace(os.Getenv("KVSTRATA_TRACES"))
	if err != nil { t.Fatal(err) }
	n, _ := strconv.Atoi(os.Getenv("COPIES"))
	c := newCorpus(tr, n)
	x := newIndex(n * workload.WorkersPerCopy)
	runtime.GC()
	f, _ := os.Create("/tmp/cpu.prof")
	pprof.StartCPUProfile(f)
	r, err := closedLoop(x, c)
	pprof.StopCPUProfile()
	f.Close()
	t.Log(r, err); b, tb, pl, by, d := x.Dbg(); t.Log(b, tb, pl, by, d, x.Bytes())
}
