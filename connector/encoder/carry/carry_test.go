package carry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/carry"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// fake is a carrier that does what a test says. What is nil goes well.
type fake struct {
	run  func(context.Context) error
	get  func(context.Context, []byte) error
	put  func(context.Context) error
	opts []carry.Opening

	mu      sync.Mutex
	puts    int
	dropped []string
}

func (f *fake) Run(ctx context.Context) error {
	if f.run != nil {
		return f.run(ctx)
	}
	<-ctx.Done()
	return nil
}

func (f *fake) Name() string    { return "fake" }
func (f *fake) Address() string { return "h:1" }

func (f *fake) Find(_ context.Context, wants []carry.Want) error {
	for i := range wants {
		wants[i].Found = true
	}
	return nil
}

func (f *fake) Get(ctx context.Context, _ *carry.Want, into []byte) (string, error) {
	if f.get != nil {
		return "somewhere", f.get(ctx, into)
	}
	return "somewhere", nil
}

func (f *fake) Put(ctx context.Context, _ encoder.Item, from []byte, _ bool) (int, error) {
	f.mu.Lock()
	f.puts++
	f.mu.Unlock()
	if f.put != nil {
		return 0, f.put(ctx)
	}
	return len(from), nil
}

func (f *fake) Drop(hash string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropped = append(f.dropped, hash)
}

func (f *fake) transport() encoder.Transport {
	return carry.Transport{
		Check: func(encoder.Setup) error { return nil },
		Open:  func(o carry.Opening) (carry.Carrier, error) { f.opts = append(f.opts, o); return f, nil },
	}.Connector()
}

func setup(extra string) encoder.Setup {
	s := encoder.Setup{
		Config: encoder.DefaultConfig(), Ranks: 1, Model: encoder.Model{Name: "m", DType: "float16", HiddenSize: 1}, Log: slog.New(slog.DiscardHandler),
	}
	s.Config.Connector, s.Config.Role = "fake", encoder.Both
	for pair := range strings.FieldsSeq(extra) {
		key, value, _ := strings.Cut(pair, "=")
		s.Config.Extra[key] = []byte(value)
	}
	return s
}

// engine makes an engine over a carrier, with a cache of 1 MiB; start runs it until the test ends.
func engine(t *testing.T, f *fake, extra string, dev device.Device) (e *encoder.Engine, start func() (stop func() error)) {
	t.Helper()
	var factory encoder.Factory
	if err := factory.Register("fake", f.transport()); err != nil {
		t.Fatal(err)
	}
	memory, err := device.Host{}.Alloc("cache", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = memory.Close() }) // after Run
	caches := encoder.Caches{Device: device.Host{}, Memory: memory}
	if dev != nil {
		caches = encoder.Caches{Device: dev, Memory: far{memory}}
	}
	if e, err = encoder.NewEngine(&factory, setup(extra), []encoder.Caches{caches}); err != nil {
		t.Fatal(err)
	}
	return e, func() func() error {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		stop := sync.OnceValue(func() error { cancel(); return <-done })
		t.Cleanup(func() { _ = stop() }) // a test that wants to know has asked
		return stop
	}
}

// far is memory that the CPU cannot address.
type far struct{ device.Memory }

func (far) Host() []byte { return nil }

// none is a device that has neither pinned memory nor streams.
type none struct {
	device.Host
	streams bool
}

var errDevice = errors.New("the device has none")

func (none) Pin(string, int) (device.Memory, error) { return nil, errDevice }

func (n none) NewStream() (device.Stream, error) {
	if n.streams {
		return n.Host.NewStream()
	}
	return nil, errDevice
}

const patience = 30 * time.Second

// load orders an item's load, and steps until it has ended.
func load(t *testing.T, e *encoder.Engine, i encoder.Item, span device.Span) connector.Output {
	t.Helper()
	if o := order(t, e, i, span); len(o.FinishedReceiving) > 0 {
		return o
	}
	return until(t, e, func(o connector.Output) bool { return len(o.FinishedReceiving) > 0 })
}

// order orders it, and runs one step.
func order(t *testing.T, e *encoder.Engine, i encoder.Item, span device.Span) connector.Output {
	t.Helper()
	r := &encoder.Request{ID: "r", Items: []encoder.Item{i}}
	wait(t, func() bool { return e.Scheduler.HasItem(r, 0) == encoder.Present })
	e.Scheduler.UpdateStateAfterAlloc(r, 0)
	o, err := e.Step(t.Context(), new(encoder.Step), map[string]device.Span{i.Hash: span}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func until(t *testing.T, e *encoder.Engine, is func(connector.Output) bool) (o connector.Output) {
	t.Helper()
	wait(t, func() bool {
		var err error
		if o, err = e.Step(t.Context(), new(encoder.Step), nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		return is(o)
	})
	return o
}

func wait(t *testing.T, is func() bool) {
	t.Helper()
	tick := time.NewTicker(100 * time.Microsecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !is(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v", patience)
		}
	}
}

// failure returns why the only transfer of an output failed.
func failure(o connector.Output) error {
	report, ok := o.Metadata.(*connector.Report)
	if !ok || len(report.Done) != 1 {
		return nil
	}
	return report.Done[0].Err
}

func TestLookupsAreBounded(t *testing.T) {
	e, start := engine(t, new(fake), "", nil)
	later, absent := 0, 0
	for n := range 1100 {
		switch e.Scheduler.HasItem(&encoder.Request{ID: fmt.Sprint(n), Items: []encoder.Item{{Hash: "h", Bytes: 1}}}, 0) {
		case encoder.Later:
			later++
		case encoder.Absent:
			absent++
		}
	}
	if later != 1024 || absent != 76 {
		t.Errorf("%d are looked up and %d are told as absent", later, absent)
	}
	start()
}

func TestSavesAreBounded(t *testing.T) {
	f := new(fake)
	e, start := engine(t, f, "", nil)
	w := e.Workers()[0]
	for n := range 4100 {
		if err := w.Save(encoder.Item{Hash: fmt.Sprint(n), Bytes: 1}, device.Span{Length: 1}); err != nil {
			t.Fatal(err)
		}
	}
	o := w.Collect(nil)
	if o == nil || o.Stats.FailedTransfers != 4 || len(o.Metadata.(*connector.Report).Done) != 4 {
		t.Fatalf("%+v; want 4 that failed", o)
	}
	// What waits is saved once, however often it is told of.
	if err := w.Save(encoder.Item{Hash: "0", Bytes: 1}, device.Span{Length: 1}); err != nil {
		t.Fatal(err)
	}
	start()
	saved := 0
	until(t, e, func(o connector.Output) bool {
		if report, ok := o.Metadata.(*connector.Report); ok {
			saved += len(report.Done)
		}
		return saved == 4096
	})
	if f.puts != 4096 {
		t.Errorf("%d puts", f.puts)
	}
}

func TestLoadTimeout(t *testing.T) {
	f := &fake{get: func(ctx context.Context, _ []byte) error { <-ctx.Done(); return ctx.Err() }}
	e, start := engine(t, f, "load_timeout=0.02", nil)
	start()
	o := load(t, e, encoder.Item{Hash: "h", Bytes: 8}, device.Span{Length: 8})
	if err := failure(o); !errors.Is(err, context.DeadlineExceeded) || len(o.FailedReceiving) != 1 || !strings.Contains(err.Error(), "item h") {
		t.Errorf("%v, %+v", err, o)
	}
}

// TestFreeWaits frees an item whose load does not end when it is cancelled.
func TestFreeWaits(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	f := &fake{get: func(context.Context, []byte) error { close(begun); <-release; return errDevice }}
	e, start := engine(t, f, "", nil)
	start()
	order(t, e, encoder.Item{Hash: "h", Bytes: 8}, device.Span{Length: 8})
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := e.Step(ctx, &encoder.Step{Freed: []string{"other", "h"}}, nil, nil, nil)
		ended <- err
	}()
	wait(t, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.dropped) == 1 })
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "item h") {
		t.Errorf("%v; want that of the context, and the item", err)
	}
	close(release)
	o := until(t, e, func(o connector.Output) bool { return len(o.FinishedReceiving) > 0 })
	if len(o.FailedReceiving) != 1 {
		t.Errorf("%+v", o)
	}
}

func TestCarrierFails(t *testing.T) {
	errDown := errors.New("down")
	f := &fake{run: func(context.Context) error { return errDown }}
	_, start := engine(t, f, "", nil)
	if err := start()(); !errors.Is(err, errDown) {
		t.Errorf("%v; want what the carrier returned", err)
	}
}

// TestRunEndsWithTransfers ends an engine that has loads and saves under way, and waiting.
func TestRunEndsWithTransfers(t *testing.T) {
	begun := make(chan struct{}, 8)
	block := func(ctx context.Context) error { begun <- struct{}{}; <-ctx.Done(); return ctx.Err() }
	f := &fake{get: func(ctx context.Context, _ []byte) error { return block(ctx) }, put: block}
	e, start := engine(t, f, "parallel=1", nil)
	stop := start()
	order(t, e, encoder.Item{Hash: "h", Bytes: 8}, device.Span{Length: 8})
	for n := range 5 {
		if err := e.Workers()[0].Save(encoder.Item{Hash: fmt.Sprint(n), Bytes: 1}, device.Span{Length: 1}); err != nil {
			t.Fatal(err)
		}
	}
	<-begun
	<-begun
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestDeviceFails(t *testing.T) {
	for _, dev := range []none{{}, {streams: true}} {
		f := new(fake)
		e, start := engine(t, f, "", dev)
		stop := start()
		o := load(t, e, encoder.Item{Hash: "h", Bytes: 8}, device.Span{Length: 8})
		if err := failure(o); !errors.Is(err, errDevice) || len(o.FailedReceiving) != 1 {
			t.Errorf("%v, %+v", err, o)
		}
		if err := e.Workers()[0].Save(encoder.Item{Hash: "h", Bytes: 8}, device.Span{Length: 8}); err != nil {
			t.Fatal(err)
		}
		o = until(t, e, func(o connector.Output) bool { return o.Metadata != nil })
		if err := failure(o); !errors.Is(err, errDevice) || o.Stats.FailedTransfers != 1 {
			t.Errorf("%v, %+v", err, o)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
}

func TestHandshake(t *testing.T) {
	f := new(fake)
	e, start := engine(t, f, "", nil)
	start()
	good, err := e.Workers()[0].Handshake()
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Scheduler.SetHandshake([][]byte{good}); err != nil {
		t.Error(err)
	}
	for _, bad := range [][][]byte{
		nil, {good, good}, {[]byte("x")}, {[]byte("{}")}, {[]byte(strings.Replace(string(good), `"h:1"`, `"h"`, 1))},
	} {
		if e.Scheduler.SetHandshake(bad) == nil {
			t.Errorf("%s is taken", bad)
		}
	}
	if shares := []bool{f.opts[0].Shares, f.opts[1].Shares}; shares[0] || !shares[1] {
		t.Errorf("scheduler's half and worker share: %v", shares)
	}
	w, err := f.transport().NewWorker(setup(""))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Handshake(); err == nil {
		t.Error("a handshake without memory")
	}
	if w.RegisterCaches(encoder.Caches{}) == nil {
		t.Error("no memory is taken")
	}
}

// TestHandOff tells of an item from when it is to be saved until it is freed.
func TestHandOff(t *testing.T) {
	f := new(fake)
	e, start := engine(t, f, "", nil)
	start()
	i := encoder.Item{Hash: "h", Bytes: 8}
	r := &encoder.Request{ID: "r", Items: []encoder.Item{i, {Hash: "other", Bytes: 1}}}
	e.Scheduler.UpdateStateAfterAlloc(r, 0)
	if err := e.Workers()[0].Save(i, device.Span{Length: 8}); err != nil {
		t.Fatal(err)
	}
	delay, params := e.Scheduler.RequestFinished(r)
	if place := params["h"]; !delay || len(params) != 1 || place.Address() != "h:1" || place.EngineID == "" {
		t.Errorf("delay %v, %+v", delay, params)
	}
	until(t, e, func(o connector.Output) bool { return len(o.FinishedSending) == 1 && o.FinishedSending[0] == "r" })
	if records := e.Scheduler.TakeRecords(); len(records) != 1 || records[0].Request != "r" || records[0].Bytes != 8 || records[0].Peer != "fake" {
		t.Errorf("%+v", records)
	}
	s := &encoder.Request{ID: "s", Items: r.Items}
	if delay, params := e.Scheduler.RequestFinished(s); delay || len(params) != 1 {
		t.Errorf("of a cached item: delay %v, %+v", delay, params)
	}
	if _, err := e.Step(t.Context(), &encoder.Step{Freed: []string{"h"}}, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	if delay, params := e.Scheduler.RequestFinished(&encoder.Request{ID: "t", Items: r.Items}); delay || params != nil {
		t.Errorf("of a freed item: delay %v, %+v", delay, params)
	}
}
