package interop_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"os/exec"
	"testing"
	"time"
)

// python is a running script of this folder that speaks JSON lines.
type python struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader

	patience time.Duration // with an answer
}

// start starts a script under the release's interpreter. It is killed when the test ends, if not before.
func (v version) start(t testing.TB, script string, args ...string) *python {
	t.Helper()
	p := &python{t: t, cmd: exec.Command(v.interpreter(), append([]string{script}, args...)...), patience: patience}
	said := &tail{most: 50}
	p.cmd.Stderr = said
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReaderSize(out, 1<<16)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s of %s %s said:\n%s", script, v.name, v.number, said)
		}
	})
	return p
}

// kill ends the script at once, as SIGKILL ends an engine. Again, it does nothing.
func (p *python) kill() {
	if p.cmd.ProcessState == nil {
		_ = p.cmd.Process.Kill() // it may have ended by itself
		_ = p.cmd.Wait()         // tells that it was killed
	}
}

// read reads the next line. A script that says nothing for too long is killed, which ends the reading.
func (p *python) read(into any) {
	p.t.Helper()
	watch := time.AfterFunc(p.patience, func() { _ = p.cmd.Process.Kill() })
	line, err := p.out.ReadBytes('\n')
	watch.Stop()
	if err != nil {
		p.t.Fatalf("%v: no answer: %v", p.cmd.Args, err)
	}
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.UseNumber() // hashes have 64 bits
	if err := dec.Decode(into); err != nil {
		p.t.Fatalf("%v: %s: %v", p.cmd.Args, line, err)
	}
}

func (p *python) write(v any) {
	p.t.Helper()
	line, err := json.Marshal(v)
	if err == nil {
		_, err = p.in.Write(append(line, '\n'))
	}
	if err != nil {
		p.t.Fatalf("%v: %v", p.cmd.Args, err)
	}
}
