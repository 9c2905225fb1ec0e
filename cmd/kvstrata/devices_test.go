package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Samples of a library's devices come through NATS into history.
func TestDevicesAreKept(t *testing.T) {
	library := filepath.Join(t.TempDir(), "libfake.so")
	out, err := exec.Command("cc", "-shared", "-fPIC", "-DFAIL_FILE=\"/nowhere\"", "-o", library, "../../connector/device/nvml/testdata/fake.c").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	data := t.TempDir()
	p := start(t, append([]string{"run", "--roles", "history", "--data", data, "--log-level", "error"}, anyPorts...)...)
	admin, url := p.says(`admin +(http://\S+)`), p.says(`embedded at (nats://\S+?),`)
	eventually(t, "history is ready", func() bool { return string(fetch(t, admin+"/readyz")) == "ready\n" }, p.output)
	start(t, "devices", "--nats", url, "--model", "m", "--instance", "e", "--device", "1", "--every", "20ms", "--library", library)
	ask := clickHouse(t, data)
	eventually(t, "samples in history", func() bool {
		return strings.HasPrefix(ask("SELECT uniqExact(device), any(device), any(model), any(instance), max(memory_used), count() > 3 FROM kvstrata.gpu_samples FORMAT TSV"),
			"1\tGPU-1\tm\te\t60000000000\t1")
	}, p.output)
	o := command(t, "devices", "--model", "m", "--instance", "e", "--library", "/nowhere/libnvidia-ml.so.1")
	if o.code == 0 || !strings.Contains(o.stderr, "load NVIDIA's management library /nowhere") {
		t.Errorf("%+v", o)
	}
	if o := command(t, "devices", "--model", "m", "--instance", "e", "--every", time.Millisecond.String()); o.code != 2 {
		t.Errorf("%+v", o)
	}
}
