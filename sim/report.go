package sim

import "time"

// Report is what a fleet did, so far or in all.
type Report struct {
	Elapsed  time.Duration // real time
	Requests uint64        // that arrived
	Finished uint64        // to the last token
	Refused  uint64        // by any engine

	// A hash id of a trace is a hit when it and all before it in the request occurred in an earlier request of the same
	// prefill engine. It is counted on the trace's ids, whatever the pool holds. 0 of 0 without a trace.
	HashIDs    uint64
	HashIDHits uint64

	// Full blocks of the prompts that prefill engines looked up, and those of them that they found in their pools.
	Blocks    uint64
	BlockHits uint64

	// Of all engines, prefill and decode.
	BlocksStored  uint64
	BlocksEvicted uint64
	BlocksLoaded  uint64
	Batches       uint64
	Preempted     uint64

	Engines []EngineReport // prefill engines first
}

// EngineReport is one engine's part of a [Report].
type EngineReport struct {
	Name     string
	Role     string // prefill or decode
	Resident int    // physical blocks cached
	Stats    EngineStats
}

// Report returns what the fleet has done; it may be called at any time. While the fleet runs, the numbers of one engine
// belong together, those of several may be a step apart. Engines in other processes are not in it.
func (f *Fleet) Report() Report {
	f.mu.Lock()
	r := Report{Elapsed: f.elapsed, Requests: f.requests, HashIDs: f.hashIDs, HashIDHits: f.idHits}
	if r.Elapsed == 0 && !f.clock.Began.IsZero() {
		r.Elapsed = time.Since(f.clock.Began)
	}
	f.mu.Unlock()
	last := f.decode
	if len(last) == 0 {
		last = f.prefill
	}
	for _, m := range f.prefill {
		stats := r.add("prefill", m)
		r.Blocks += stats.BlockLookups
		r.BlockHits += stats.BlockHits
	}
	for _, m := range f.decode {
		r.add("decode", m)
	}
	for _, e := range r.Engines[max(0, len(r.Engines)-len(last)):] {
		r.Finished += e.Stats.Finished
	}
	return r
}

// add enters an engine's numbers.
func (r *Report) add(role string, m *member) EngineStats {
	if m.host == nil {
		return EngineStats{}
	}
	e := EngineReport{Role: role}
	m.host.View(func(engine *Engine) {
		e.Name, e.Resident, e.Stats = engine.Name(), engine.ResidentBlocks(), engine.Stats()
	})
	r.Engines = append(r.Engines, e)
	r.Refused += e.Stats.Refused
	r.BlocksStored += e.Stats.BlocksStored
	r.BlocksEvicted += e.Stats.BlocksEvicted
	r.BlocksLoaded += e.Stats.BlocksLoaded
	r.Batches += e.Stats.Batches
	r.Preempted += e.Stats.Preempted
	return e.Stats
}
