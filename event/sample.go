package event

import (
	"kvstrata/event/eventpb"

	"google.golang.org/protobuf/proto"
)

// Sample is a record of kind `gpu`: the state of one device of an engine at one moment. What is not known is 0.
type Sample struct {
	Source       Source
	Time         Time
	Device       string // its UUID
	MemoryUsed   uint64 // bytes
	MemoryTotal  uint64
	Busy         uint32 // percent of the time in which a kernel ran
	MemoryBusy   uint32 // percent of the time in which memory was read or written
	Power        uint64 // mW
	Temperature  uint32 // degrees Celsius
	PCIeReceived uint64 // bytes a second
	PCIeSent     uint64
}

// MarshalSamples returns the payload of a message of kind `gpu`; the engine stands in the subject.
func MarshalSamples(samples []Sample) ([]byte, error) {
	pb := &eventpb.Samples{}
	for i := range samples {
		s := &samples[i]
		pb.Samples = append(pb.Samples, &eventpb.Sample{
			Time: int64(s.Time), Device: recordText(s.Device), MemoryUsed: s.MemoryUsed, MemoryTotal: s.MemoryTotal, Busy: s.Busy,
			MemoryBusy: s.MemoryBusy, Power: s.Power, Temperature: s.Temperature, PcieReceived: s.PCIeReceived, PcieSent: s.PCIeSent,
		})
	}
	return proto.Marshal(pb)
}

// UnmarshalSamples reads what MarshalSamples wrote, for the engine that the subject names.
func UnmarshalSamples(payload []byte, source Source) ([]Sample, error) {
	var pb eventpb.Samples
	if err := proto.Unmarshal(payload, &pb); err != nil {
		return nil, &WireError{Field: "samples", Reason: err.Error()}
	}
	var samples []Sample
	for _, s := range pb.Samples {
		samples = append(samples, Sample{
			Source: source, Time: Time(s.GetTime()), Device: s.GetDevice(), MemoryUsed: s.GetMemoryUsed(), MemoryTotal: s.GetMemoryTotal(),
			Busy: s.GetBusy(), MemoryBusy: s.GetMemoryBusy(), Power: s.GetPower(), Temperature: s.GetTemperature(), PCIeReceived: s.GetPcieReceived(),
			PCIeSent: s.GetPcieSent(),
		})
	}
	return samples, nil
}
