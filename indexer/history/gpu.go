package history

import "kvstrata/event"

// gpuRows are rows of gpu_samples.
type gpuRows struct {
	recordHeads
	device                                             []string
	memoryUsed, memoryTotal, power, received, sentAway []uint64
	busy, memoryBusy, temperature                      []uint32
}

func (r *gpuRows) columns() []column {
	return append(
		r.recordHeads.columns(),
		column{"device", text, r.device},
		column{"memory_used", u64, r.memoryUsed},
		column{"memory_total", u64, r.memoryTotal},
		column{"busy", u32, r.busy},
		column{"memory_busy", u32, r.memoryBusy},
		column{"power_mw", u64, r.power},
		column{"temperature", u32, r.temperature},
		column{"pcie_received", u64, r.received},
		column{"pcie_sent", u64, r.sentAway},
	)
}

func (r *gpuRows) add(at place, n int, s *event.Sample) {
	r.recordHeads.add(at, n, &s.Source, s.Time)
	r.device = append(r.device, s.Device)
	r.memoryUsed = append(r.memoryUsed, s.MemoryUsed)
	r.memoryTotal = append(r.memoryTotal, s.MemoryTotal)
	r.busy = append(r.busy, s.Busy)
	r.memoryBusy = append(r.memoryBusy, s.MemoryBusy)
	r.power = append(r.power, s.Power)
	r.temperature = append(r.temperature, s.Temperature)
	r.received = append(r.received, s.PCIeReceived)
	r.sentAway = append(r.sentAway, s.PCIeSent)
}
