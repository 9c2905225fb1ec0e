package main

import (
	"os"
	"runtime/pprof"
	"testing"
	"runtime"
	"strconv"

	"kvstrata/bench/workload"
)

func TestProfIngest(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("SHAPE"))
	m, _ := strconv.Atoi(os.Getenv("MSGS"))
	payloads := workload.Payloads(workload.Shape(n), 16, m, false)
	g := newIngester(16)
	runtime.GC()
	f, _ := os.Create("/tmp/cpu.prof")
	pprof.StartCPUProfile(f)
	b := cpuTime()
	for i := range payloads {
		if err := g.take(&payloads[i], applied); err != nil { t.Fatal(err) }
	}
	t.Log(float64((cpuTime()-b).Nanoseconds())/1000/float64(16*workload.Shape(n).Events(m)))
	pprof.StopCPUProfile()
	f.Close()
}
