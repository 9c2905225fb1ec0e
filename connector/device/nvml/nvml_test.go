package nvml_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector/device/nvml"
	"kvstrata/event"
)

// build compiles the fake library, and returns where it is and the file that makes it fail.
func build(t *testing.T) (library, fail string) {
	t.Helper()
	dir := t.TempDir()
	library, fail = filepath.Join(dir, "libfake.so"), filepath.Join(dir, "fail")
	out, err := exec.Command("cc", "-shared", "-fPIC", "-DFAIL_FILE=\""+fail+"\"", "-o", library, "testdata/fake.c").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return library, fail
}

func TestSample(t *testing.T) {
	library, fail := build(t)
	l, err := nvml.Open(library)
	if err != nil {
		t.Fatal(err)
	}
	source := event.Source{Model: "m", Instance: "i", Origin: event.Engine}
	got, err := l.Sample(source, 7)
	if err != nil {
		t.Fatal(err)
	}
	want := []event.Sample{
		{
			Source: source, Time: 7, Device: "GPU-0", MemoryUsed: 60e9, MemoryTotal: 80e9, Busy: 97, MemoryBusy: 45, Power: 412_000, Temperature: 61,
			PCIeReceived: 2_000_000, PCIeSent: 7000,
		},
		{Source: source, Time: 7, Device: "GPU-1", MemoryUsed: 60e9, MemoryTotal: 160e9, Power: 412_000, Temperature: 61},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if err := os.WriteFile(fail, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Sample(source, 8); err == nil || !strings.Contains(err.Error(), "read memory of GPU-0: GPU is lost") {
		t.Errorf("%v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err == nil {
		t.Error("closed twice")
	}
}

func TestOpen(t *testing.T) {
	library, _ := build(t)
	l, err := nvml.Open(library, 1)
	if err != nil || l.Devices() != 1 {
		t.Fatal(err)
	}
	if got, err := l.Sample(event.Source{}, 1); err != nil || got[0].Device != "GPU-1" {
		t.Errorf("%+v, %v", got, err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for want, open := range map[string]func() (*nvml.Library, error){
		"there are 2":                   func() (*nvml.Library, error) { return nvml.Open(library, 2) },
		"device -1":                     func() (*nvml.Library, error) { return nvml.Open(library, -1) },
		"load NVIDIA's":                 func() (*nvml.Library, error) { return nvml.Open("/nowhere/libnvidia-ml.so.1") },
		"no management library that is": func() (*nvml.Library, error) { return nvml.Open("libm.so.6") },
	} {
		if _, err := open(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
