package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/history/embedded"
	"kvstrata/indexer/prefix"
	"kvstrata/porttest"
	"kvstrata/tracetest"
)

// binary is kvstrata as people run it; TestMain builds it.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "kvstrata-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "kvstrata")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Stderr = os.Stderr
	code := 1
	if err := errors.Join(build.Run(), findEngine()); err == nil {
		code = m.Run()
	} else {
		fmt.Fprintln(os.Stderr, err)
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// findEngine tells the binary where make setup put the ClickHouse engine's library.
func findEngine() error {
	if err := os.Chdir("../.."); err != nil {
		return err
	}
	library, err := embedded.Find("")
	if err != nil {
		return err
	}
	return errors.Join(os.Setenv("KVSTRATA_CHDB", library), os.Chdir("cmd/kvstrata"))
}

// outcome is how a command ended.
type outcome struct {
	code           int
	stdout, stderr string
}

// command runs the binary to its end.
func command(t *testing.T, args ...string) outcome {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// process is a command that goes on until it is told to stop.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	mu     sync.Mutex
	out    bytes.Buffer
	exited chan struct{}
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(binary, args...), exited: make(chan struct{})}
	pipe, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stderr = lockedWriter{p}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			fmt.Fprintln(lockedWriter{p}, lines.Text())
		}
		_ = p.cmd.Wait() // the exit code is looked at by whoever stops it
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
	})
	return p
}

type lockedWriter struct{ p *process }

func (w lockedWriter) Write(b []byte) (int, error) {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	return w.p.out.Write(b)
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// says waits until the output matches, and returns the first group.
func (p *process) says(pattern string) string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	var found []string
	eventually(p.t, "output that matches "+pattern, func() bool {
		found = re.FindStringSubmatch(p.output())
		return found != nil
	}, p.output)
	return found[len(found)-1]
}

// interrupt sends a signal, and returns the exit code and how long the end took.
func (p *process) interrupt(sig os.Signal) (code int, took time.Duration) {
	p.t.Helper()
	begin := time.Now()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
	select {
	case <-p.exited:
	case <-time.After(30 * time.Second):
		p.t.Fatalf("it did not stop:\n%s", p.output())
	}
	return p.cmd.ProcessState.ExitCode(), time.Since(begin)
}

const patience = 60 * time.Second

func eventually(t *testing.T, what string, cond func() bool, context func() string) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s:\n%s", what, context())
		}
	}
}

func sources(t *testing.T, url string) []prefix.SourceInfo {
	t.Helper()
	resp, err := http.Get(url + "/v1/sources")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct{ Sources []prefix.SourceInfo }
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return answer.Sources
}

var anyPorts = []string{"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0"}

func TestDemoRunsAndStops(t *testing.T) {
	before, _ := filepath.Glob(filepath.Join(os.TempDir(), "kvstrata-demo-*"))
	p := start(t, append([]string{"demo"}, anyPorts...)...)
	url := p.says(`kvstrata demo at (http://\S+)`)
	nats := p.says(`embedded at (nats://\S+?),`)
	admin := p.says(`admin +(http://\S+)`)
	eventually(t, "four live engines with events", func() bool {
		live := 0
		for _, s := range sources(t, url) {
			if s.Source.Origin == event.Engine && s.State == event.StateLive && s.Started && s.Balanced && s.Digest.Differed == 0 {
				live++
			}
		}
		return live == 4
	}, p.output)

	ready := func() (int, string) {
		resp, err := http.Get(admin + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var body bytes.Buffer
		_, _ = body.ReadFrom(resp.Body)
		return resp.StatusCode, body.String()
	}
	eventually(t, "ready", func() bool { code, _ := ready(); return code == http.StatusOK }, func() string { _, body := ready(); return body })

	alertsFindTheirMetrics(t, admin)

	tail := command(t, "tail", "--nats", nats, "--kind", "stored", "--source", "prefill-*", "--from-start", "--json", "--count", "3")
	lines := strings.Split(strings.TrimSpace(tail.stdout), "\n")
	if tail.code != exitOK || len(lines) != 3 {
		t.Fatalf("tail: %+v", tail)
	}
	var line struct {
		Kind   string
		Blocks []struct{ Prefix string }
	}
	if err := json.Unmarshal([]byte(lines[0]), &line); err != nil || line.Kind != "STORED" || line.Blocks[0].Prefix == "" {
		t.Fatalf("%s: %v", lines[0], err)
	}
	human := command(t, "tail", "--nats", nats, "--from-start", "--count", "2")
	if human.code != exitOK || !strings.Contains(human.stdout, "STORED") {
		t.Errorf("tail for people: %+v", human)
	}
	lookup := command(t, "lookup", "--server", url, "--model", demoModel, "--hashes", line.Blocks[0].Prefix)
	if lookup.code != exitOK || !regexp.MustCompile(`demo/llama-sim@prefill-\d +live +16 +1 of 16 +16 +GPU 1`).MatchString(lookup.stdout) {
		t.Errorf("lookup: %+v", lookup)
	}
	if unknown := command(t, "lookup", "--server", url, "--model", "no-such", "1"); unknown.code != exitFailure || !strings.Contains(unknown.stderr, demoModel) {
		t.Errorf("an unknown model should name the known ones: %+v", unknown)
	}
	engine := regexp.MustCompile(`publishes on (tcp://\S+), replays on (\S+)`).FindStringSubmatch(p.output())
	doctor := command(t, "doctor", "--server", url, "--nats", nats, "--engine", "zmq+"+engine[1]+",replay="+engine[2]+",model=m")
	if doctor.code != exitOK || strings.Count(doctor.stdout, "ok ") != 5 || !strings.Contains(doctor.stdout, "dialect   vllm, map; hashes uint64") {
		t.Errorf("doctor: %+v", doctor)
	}

	code, took := p.interrupt(os.Interrupt)
	if code != exitOK || took > 5*time.Second {
		t.Errorf("exit %d after %v:\n%s", code, took, p.output())
	}
	if after, _ := filepath.Glob(filepath.Join(os.TempDir(), "kvstrata-demo-*")); len(after) > len(before) {
		t.Errorf("folders left behind: %v", after)
	}
}

func TestTraceSmall(t *testing.T) {
	for _, form := range []string{"map", "array"} {
		o := command(t, append([]string{
			"demo", "--trace", "../../sim/testdata/small.jsonl", "--speed", "max", "--exit", "--form", form, "--pool-blocks", "2048",
			"--log-level", "warn",
		}, anyPorts...)...)
		if o.code != exitOK {
			t.Fatalf("exit %d\n%s\n%s", o.code, o.stdout, o.stderr)
		}
		for _, want := range []string{"every engine's resident set and totals are the same", "prefill-1", "decode-1", "adds up", "150 requests"} {
			if !strings.Contains(o.stdout, want) {
				t.Errorf("%s: the report does not say %q:\n%s", form, want, o.stdout)
			}
		}
		if regexp.MustCompile(`evicted 0,`).MatchString(o.stdout) {
			t.Errorf("%s: a pool this small must evict:\n%s", form, o.stdout)
		}
	}
}

// TestTraceConversation runs the real trace through the whole road. Its numbers were counted by other means.
func TestTraceConversation(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: the real trace is not run in -short mode; make trace runs it")
	}
	dir := tracetest.Folder(t)
	trace := filepath.Join(dir, "mooncake_conversation_trace.jsonl")
	for _, c := range []struct {
		prefill string
		wants   []string
	}{
		{"1", []string{"12031 requests", "105710 of 288500 were hits (36.641 %)", "3381090 of 9044013 full 16-token blocks were hits (37.38 %)"}},
		{"2", []string{"12031 requests", "78076 of 288500 were hits (27.063 %)", "2497631 of 9044013 full 16-token blocks were hits (27.62 %)"}},
	} {
		o := command(t, append([]string{
			"demo", "--trace", trace, "--speed", "max", "--exit", "--prefill", c.prefill, "--decode", "0", "--pool-blocks", "20000000",
			"--log-level", "warn",
		}, anyPorts...)...)
		if o.code != exitOK {
			t.Fatalf("exit %d\n%s\n%s", o.code, o.stdout, o.stderr)
		}
		for _, want := range append(c.wants, "every engine's resident set and totals are the same") {
			if !strings.Contains(o.stdout, want) {
				t.Errorf("the report does not say %q:\n%s", want, o.stdout)
			}
		}
	}
}

func TestRunOutlivesWhatIsMissing(t *testing.T) {
	dead := porttest.Address(t)
	p := start(t, append([]string{"run", "--data", t.TempDir(), "--engine", "zmq+tcp://" + dead + ",model=m,instance=away"}, anyPorts...)...)
	url := p.says(`api +(http://\S+)`)
	eventually(t, "a state that says why", func() bool {
		all := sources(t, url)
		return len(all) == 1 && all[0].State == event.StateRecovering && all[0].Reason == "not connected yet"
	}, p.output)
	if code, took := p.interrupt(syscall.SIGTERM); code != exitOK || took > 5*time.Second {
		t.Errorf("exit %d after %v:\n%s", code, took, p.output())
	}
}

func TestBadInputIsNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dead := porttest.Address(t)
	for _, c := range []struct {
		args  string
		code  int
		wants []string
	}{
		{"", exitUsage, []string{"demo", "--help"}},
		{"fly", exitUsage, []string{"fly"}},
		{"demo --speed fast", exitUsage, []string{"--speed", "fast", "max or a factor"}},
		{"demo --exit", exitUsage, []string{"--exit", "--trace"}},
		{"demo --nats-listen 127.0.0.1:0 --prefill 0", exitUsage, []string{"--prefill 0", "1 to 64"}},
		{"demo --nats-listen 127.0.0.1:0 --pool-blocks 1", exitUsage, []string{"pool-blocks 1", "2 to"}},
		{"demo --form msgpack", exitUsage, []string{"--form", "map", "array", "msgpack"}},
		{"demo --nats-listen 127.0.0.1:0 --trace /no/such --speed max --exit", exitUsage, []string{"--trace /no/such"}},
		{"demo --nats-listen 127.0.0.1:0 --admin 127.0.0.1:0 --listen " + taken.Addr().String(), exitFailure, []string{"--listen", taken.Addr().String(), "is free"}},
		{"demo --nats-listen 127.0.0.1:0 --listen nonsense", exitUsage, []string{"--listen", "nonsense", "host:port"}},
		{"demo --nats-listen here", exitUsage, []string{"--nats-listen", "here", "host:port"}},
		{"demo --nats-listen " + taken.Addr().String(), exitFailure, []string{taken.Addr().String(), "another address with --nats-listen"}},
		{"run", exitUsage, []string{"--engine"}},
		{"query tresh", exitUsage, []string{"no such query \"tresh\"", "did you mean \"thrash\"?"}},
		{"query state --param bye=tier", exitUsage, []string{"parameter bye", "did you mean \"by\"?"}},
		{"query state --param by=tiers", exitUsage, []string{"parameter by", "did you mean \"tier\"?", "tier, group, depth, blocks"}},
		{"explain", exitUsage, []string{"a hash, --tokens or --request"}},
		{"explain 00 --request r", exitUsage, []string{"do not go with"}},
		{"explain --tokens /no/such --model m", exitUsage, []string{"--tokens", "/no/such"}},
		{"explain --tokens - --model m", exitUsage, []string{"give one of them"}},
		{"explain --request r --at yesterday", exitUsage, []string{"parameter at", "yesterday"}},
		{"run --roles chef", exitUsage, []string{"--roles", "chef", "subscriber, prefix"}},
		{"run --engine http://x", exitUsage, []string{"--engine", "http://x", "zmq+tcp://host:port"}},
		{"run --engines /no/such", exitUsage, []string{"--engines /no/such"}},
		{"run --nats-replicas 9 --roles prefix --nats nats://" + dead, exitUsage, []string{"--nats-replicas 9", "1 to 5"}},
		{"run --roles prefix --shard 3/2", exitUsage, []string{"--shard", "3/2", "1 to 2"}},
		{"run --roles prefix,web --shard 1/2", exitUsage, []string{"--shard 1/2", "without web"}},
		{"gather", exitUsage, []string{"--shards"}},
		{"gather --shards 10.0.0.1:80", exitUsage, []string{"--shards", "10.0.0.1:80", "http://host:port"}},
		{"lookup --model m", exitUsage, []string{"no prompt"}},
		{"lookup --model m seven", exitUsage, []string{"seven", "--hashes"}},
		{"lookup --model m --hashes xyz", exitUsage, []string{"xyz", "16 hexadecimal digits"}},
		{"lookup --model m --server http://" + dead + " 1", exitFailure, []string{"--server"}},
		{"tail --kind boiled", exitUsage, []string{"--kind", "boiled", "STORED"}},
		{"tail --source [ ", exitUsage, []string{"--source"}},
		{"doctor --nats nats://" + dead + " --engine zmq+tcp://" + dead + ",model=m --listen " + taken.Addr().String(), exitFailure, []string{"WRONG", "--nats", "bound", "another --listen"}},
		{"bench pipeline --batch 0", exitUsage, []string{"--batch 0", "1 to 4096"}},
		{"bench history --pool 0", exitUsage, []string{"--pool", "1 or more"}},
		{"bench history --traces /nowhere", exitFailure, []string{"KVSTRATA_TRACES", "mooncake_conversation_trace.jsonl"}},
	} {
		t.Run(c.args, func(t *testing.T) {
			o := command(t, strings.Fields(c.args)...)
			if o.code != c.code {
				t.Errorf("exit %d, want %d", o.code, c.code)
			}
			for _, want := range c.wants {
				if !strings.Contains(o.stdout+o.stderr, want) {
					t.Errorf("it does not say %q:\n%s%s", want, o.stdout, o.stderr)
				}
			}
			if strings.Contains(o.stderr, "goroutine ") {
				t.Errorf("it crashed:\n%s", o.stderr)
			}
		})
	}
}

func TestHelpShowsAnExample(t *testing.T) {
	for _, args := range []string{"demo", "run", "gather", "tail", "lookup", "doctor", "bench pipeline", "bench history", "version"} {
		o := command(t, append(strings.Fields(args), "--help")...)
		if o.code != exitOK || !strings.Contains(o.stdout, "Example") || !strings.Contains(o.stdout, "kvstrata "+args) {
			t.Errorf("%s: exit %d\n%s", args, o.code, o.stdout)
		}
	}
	if o := command(t, "version"); o.code != exitOK || !strings.Contains(o.stdout, "libzmq 4.") {
		t.Errorf("version: %+v", o)
	}
}

func TestExitCodes(t *testing.T) {
	for code, err := range map[int]error{
		exitOK: nil, exitFailure: errors.New("x"), exitUsage: fmt.Errorf("a: %w", usagef("x")), exitMismatch: fmt.Errorf("%w: x", errMismatch),
	} {
		if got := exitCode(err); got != code {
			t.Errorf("%v gives %d, want %d", err, got, code)
		}
	}
}

func TestBenchPrintsItsFigures(t *testing.T) {
	o := command(t, "bench", "pipeline", "--blocks", "40000", "--lag-for", "1s", "--pool", "4000", "--format", "json", "--log-level", "error")
	var r result
	if err := json.Unmarshal([]byte(o.stdout), &r); err != nil || o.code != exitOK {
		t.Fatalf("%v\n%+v", err, o)
	}
	for _, name := range []string{"block_events_per_s", "visible_lag_p50_ms", "visible_lag_p99_ms", "peak_rss_mb"} {
		if r.Figures[name].Value <= 0 {
			t.Errorf("%s is %v", name, r.Figures[name])
		}
	}
}
