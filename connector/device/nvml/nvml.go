// Package nvml samples NVIDIA's devices through their management library, which is loaded when it is there.
package nvml

import (
	"bytes"
	"errors"
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"

	"kvstrata/event"
)

// result is an nvmlReturn_t.
type result int32

// Results that are told apart (nvml.h).
const (
	success      result = 0
	notSupported result = 3
)

// handle is an nvmlDevice_t.
type handle uintptr

// memory is an nvmlMemory_t: the second is what is free.
type memory struct{ total, _, used uint64 }

type utilization struct{ gpu, memory uint32 }

// Kinds that calls take: of a sensor, and of a direction.
const (
	sensorGPU    int32 = 0
	pcieSent     int32 = 0
	pcieReceived int32 = 1
)

// Library is the management library, opened. One goroutine uses it.
type Library struct {
	shutdown    func() result
	errorText   func(result) string
	count       func(*uint32) result
	byIndex     func(uint32, *handle) result
	uuid        func(handle, unsafe.Pointer, uint32) result
	memory      func(handle, *memory) result
	utilization func(handle, *utilization) result
	power       func(handle, *uint32) result
	temperature func(handle, int32, *uint32) result
	pcie        func(handle, int32, *uint32) result

	devices []device
}

// device is one of the machine's.
type device struct {
	handle handle
	uuid   string
}

// Open loads the library, and finds the devices with these indexes; none = all. The caller closes it.
func Open(path string, indexes ...int) (*Library, error) {
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("load NVIDIA's management library %s: %w", path, err)
	}
	l := &Library{}
	var start func() result
	var missing []error
	for _, f := range []struct {
		name string
		to   any
	}{
		{"nvmlInit_v2", &start},
		{"nvmlShutdown", &l.shutdown},
		{"nvmlErrorString", &l.errorText},
		{"nvmlDeviceGetCount_v2", &l.count},
		{"nvmlDeviceGetHandleByIndex_v2", &l.byIndex},
		{"nvmlDeviceGetUUID", &l.uuid},
		{"nvmlDeviceGetMemoryInfo", &l.memory},
		{"nvmlDeviceGetUtilizationRates", &l.utilization},
		{"nvmlDeviceGetPowerUsage", &l.power},
		{"nvmlDeviceGetTemperature", &l.temperature},
		{"nvmlDeviceGetPcieThroughput", &l.pcie},
	} {
		symbol, err := purego.Dlsym(lib, f.name)
		if err != nil {
			missing = append(missing, err)
			continue
		}
		purego.RegisterFunc(f.to, symbol)
	}
	if err := errors.Join(missing...); err != nil {
		return nil, fmt.Errorf("%s is no management library that is known: %w", path, err)
	}
	if err := l.check("start", start()); err != nil {
		return nil, err
	}
	if err := l.find(indexes); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// find looks for the devices that are to be sampled.
func (l *Library) find(indexes []int) error {
	var count uint32
	if err := l.check("count devices", l.count(&count)); err != nil {
		return err
	}
	if len(indexes) == 0 {
		for i := range int(count) {
			indexes = append(indexes, i)
		}
	}
	if len(indexes) == 0 {
		return errors.New("there is no NVIDIA device")
	}
	for _, i := range indexes {
		if i < 0 || i >= int(count) {
			return fmt.Errorf("device %d: there are %d, from 0 on", i, count)
		}
		var d device
		if err := l.check("find device", l.byIndex(uint32(i), &d.handle)); err != nil {
			return err
		}
		name := make([]byte, 96) // NVML_DEVICE_UUID_V2_BUFFER_SIZE
		if err := l.check("name device", l.uuid(d.handle, unsafe.Pointer(&name[0]), uint32(len(name)))); err != nil {
			return err
		}
		name, _, _ = bytes.Cut(name, []byte{0})
		d.uuid = string(name)
		l.devices = append(l.devices, d)
	}
	return nil
}

// Devices returns how many are sampled.
func (l *Library) Devices() int { return len(l.devices) }

// Sample reads what each device is at, for a source and a time. What a device does not tell is 0.
func (l *Library) Sample(source event.Source, now event.Time) ([]event.Sample, error) {
	samples := make([]event.Sample, 0, len(l.devices))
	for _, d := range l.devices {
		var m memory
		var u utilization
		var power, temperature, sent, received uint32
		for _, ask := range []struct {
			what string
			got  result
		}{
			{"memory", l.memory(d.handle, &m)},
			{"utilization", l.utilization(d.handle, &u)},
			{"power", l.power(d.handle, &power)},
			{"temperature", l.temperature(d.handle, sensorGPU, &temperature)},
			{"PCIe throughput", l.pcie(d.handle, pcieSent, &sent)},
			{"PCIe throughput", l.pcie(d.handle, pcieReceived, &received)},
		} {
			if ask.got == notSupported {
				continue
			}
			if err := l.check("read "+ask.what+" of "+d.uuid, ask.got); err != nil {
				return nil, err
			}
		}
		samples = append(samples, event.Sample{
			Source: source, Time: now, Device: d.uuid, MemoryUsed: m.used, MemoryTotal: m.total, Busy: u.gpu, MemoryBusy: u.memory,
			Power: uint64(power), Temperature: temperature, PCIeReceived: uint64(received) * 1000, PCIeSent: uint64(sent) * 1000, // it tells kB/s
		})
	}
	return samples, nil
}

// Close ends the use of the library.
func (l *Library) Close() error { return l.check("end", l.shutdown()) }

func (l *Library) check(what string, got result) error {
	if got == success {
		return nil
	}
	return fmt.Errorf("NVIDIA's management library: %s: %s", what, l.errorText(got))
}
