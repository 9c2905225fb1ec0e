package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"kvstrata/indexer/history"
	"kvstrata/indexer/prefix"
	"kvstrata/porttest"
)

// page is the dashboard in a real browser.
type page struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	console  []string // errors and exceptions
	expected string   // what an error may say for now, one or another between bars; empty = none may come
}

// openBrowser starts Chromium. Without one the test fails in CI, and is skipped elsewhere.
func openBrowser(t *testing.T) *page {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil && os.Getenv("CI") != "" {
		t.Fatalf("%v; make setup-test installs it", err)
	}
	if err != nil {
		t.Skipf("SKIPPED: %v; make setup-test installs it", err)
	}
	alloc, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WindowSize(1440, 900), chromedp.UserDataDir(t.TempDir()))...)
	ctx, cancel := chromedp.NewContext(alloc)
	p := &page{t: t, ctx: ctx}
	messages := chromedp.Console(ctx)
	var read sync.WaitGroup
	read.Go(func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			if m.IsException() || m.Type == "error" {
				p.mu.Lock()
				if p.expected == "" || !slices.ContainsFunc(strings.Split(p.expected, "|"), func(text string) bool { return strings.Contains(m.String(), text) }) {
					p.console = append(p.console, m.String())
				}
				p.mu.Unlock()
			}
		}
	})
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx) // it may have died with the test
		cancel()
		stop()
		read.Wait()
		if len(p.console) > 0 {
			t.Errorf("the console has errors:\n%s", strings.Join(p.console, "\n"))
		}
	})
	return p
}

// expect says what errors may say from now on.
func (p *page) expect(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expected = text
}

func (p *page) do(what string, steps ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
}

// eval returns what an expression in the page gives.
func eval[T any](p *page, expression string) T {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		p.t.Fatalf("evaluate %s: %v", expression, err)
	}
	return v
}

// at is a CSS selector of everything with a test's name.
func at(name string) string { return `[data-testid="` + name + `"]` }

// texts returns the texts of everything with a name.
func (p *page) texts(name string) []string {
	p.t.Helper()
	return eval[[]string](p, fmt.Sprintf(`[...document.querySelectorAll(%q)].map(e => e.innerText)`, at(name)))
}

// number returns the first number with a name: its data-value, or its text.
func (p *page) number(name string) float64 {
	p.t.Helper()
	text := eval[string](p, fmt.Sprintf(`(e => e ? (e.dataset.value ?? e.innerText) : "")(document.querySelector(%q))`, at(name)))
	n, err := strconv.ParseFloat(strings.ReplaceAll(strings.TrimSpace(text), ",", ""), 64)
	if err != nil {
		return -1
	}
	return n
}

// show opens a screen by its address and waits until it is live.
func (p *page) show(address string) {
	p.t.Helper()
	p.do("open "+address, chromedp.Navigate(address))
	p.live()
}

func (p *page) live() {
	p.t.Helper()
	eventually(p.t, "the page is live", func() bool {
		return eval[string](p, fmt.Sprintf(`document.querySelector(%q)?.dataset.phase ?? ""`, at("connection"))) == "live"
	}, func() string { return eval[string](p, `document.body.innerText`) })
}

// get asks the API.
func get[T any](t *testing.T, address string) T {
	t.Helper()
	var v T
	resp, err := http.Get(address)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v", address, resp.Status, err)
	}
	return v
}

// inject adds a source to the demo's stream: an engine with a name that is a trap.
func inject(t *testing.T, nats, name string) {
	t.Helper()
	p := start(t, "run", "--roles", "subscriber", "--nats", nats, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
		"--engine", "zmq+tcp://"+porttest.Address(t)+",model=demo/llama-sim,instance="+name)
	p.says(`api +(http://\S+)`)
}

const trap = `<img src=x onerror=document.title=1>`

// TestDashboard drives the real binary through a real browser.
func TestDashboard(t *testing.T) {
	data := t.TempDir()
	listen, nats := porttest.Address(t), porttest.Address(t)
	args := []string{
		"demo", "--pool-blocks", "1024", "--data", data, "--listen", listen, "--admin", "127.0.0.1:0", "--nats-listen", nats,
	}
	demo := start(t, args...)
	base := demo.says(`kvstrata demo at (http://\S+)`)
	p := openBrowser(t)
	p.show(base + "/")
	inject(t, "nats://"+nats, trap)

	t.Run("the numbers match the API", func(t *testing.T) { numbersMatch(t, p, base) })
	t.Run("names are text", func(t *testing.T) { namesAreText(t, p, base) })
	t.Run("a source's contract is shown", func(t *testing.T) { contractShown(t, p, base) })
	t.Run("a tail filter works", func(t *testing.T) { tailFilters(t, p, base) })
	t.Run("transfers are shown", func(t *testing.T) { transfersShown(t, p, base) })
	t.Run("a query runs", func(t *testing.T) { queryRuns(t, p, base) })
	t.Run("explain tells the story of an evicted block", func(t *testing.T) { explainTells(t, p, base) })
	t.Run("a reload restores the state", func(t *testing.T) { reloadRestores(t, p, base) })
	t.Run("no violation, nothing clipped", func(t *testing.T) { accessible(t, p, base) })
	t.Run("a dead and a wedged ClickHouse are seen", func(t *testing.T) { engineDies(t, p, base) })
	t.Run("the page survives a restart", func(t *testing.T) {
		p.show(base + "/engines?q=prefill")
		p.expect("WebSocket|ERR_CONNECTION_")
		if code, _ := demo.interrupt(os.Interrupt); code != exitOK {
			t.Fatalf("exit %d\n%s", code, demo.output())
		}
		eventually(t, "the page says that it is not connected", func() bool {
			return eval[string](p, fmt.Sprintf(`document.querySelector(%q)?.dataset.phase ?? ""`, at("connection"))) != "live"
		}, func() string { return "" })
		kept := start(t, args...)
		kept.says(`kvstrata demo at (http://\S+)`)
		p.live() // what was logged while nobody answered may still be on its way
		eventually(t, "the rows of the new life", func() bool { return len(p.texts("engine-row")) == 4 },
			func() string { return strings.Join(p.texts("engine-row"), "\n") })
		lives := func() any {
			for _, row := range get[history.Answer](t, base+"/v1/query/engines?since=1h").Rows {
				if row[1] == "prefill-0" {
					return row[8]
				}
			}
			return nil
		}
		eventually(t, "history of both lives", func() bool { return lives() == 2.0 }, func() string { return fmt.Sprint(lives()) })
	})
}

func numbersMatch(t *testing.T, p *page, base string) {
	eventually(t, "every source is on the page", func() bool {
		return int(p.number("sources-total")) == len(sources(t, base)) && p.number("sources-live") == 8
	}, func() string { return eval[string](p, `document.body.innerText`) })
	p.show(base + "/engines")
	eventually(t, "a row an engine", func() bool { return len(p.texts("engine-row")) == len(sources(t, base)) },
		func() string { return strings.Join(p.texts("engine-row"), "\n") })
	// The engines go on: what the page shows lies between what the API said before and after.
	before := seqs(t, base)
	rows := eval[map[string]string](p, fmt.Sprintf(`Object.fromEntries([...document.querySelectorAll(%q)].map(r => [r.dataset.id, r.innerText]))`, at("engine-row")))
	after := seqs(t, base)
	for id, first := range before {
		found := false
		for seq := first - min(first, 50); seq <= after[id]+1; seq++ { // a frame may be a tenth of a second old
			found = found || strings.Contains(rows[id], thousands(seq))
		}
		if !found {
			t.Errorf("%s: the row does not show a sequence from %d to %d:\n%s", id, first, after[id], rows[id])
		}
	}
	p.show(base + "/prefixes")
	eventually(t, "prefixes are listed", func() bool { return len(p.texts("prefix-row")) > 0 }, func() string { return "" })
	shown := eval[[]string](p, fmt.Sprintf(`[...document.querySelectorAll(%q)].map(r => r.dataset.prefix)`, at("prefix-row")))
	known := make(map[string]bool)
	for _, row := range get[struct{ Rows []prefix.HotPrefix }](t, base+"/v1/prefixes?limit=1000").Rows {
		known[row.Prefix.String()] = true
	}
	for _, hash := range shown {
		if !known[hash] {
			t.Errorf("the page shows prefix %s, which the API does not list", hash)
		}
	}
}

// seqs returns each started engine's sequence.
func seqs(t *testing.T, base string) map[string]uint64 {
	all := make(map[string]uint64)
	for _, s := range sources(t, base) {
		if s.Started {
			all[s.Source.Tokens()] = uint64(s.LastSeq)
		}
	}
	return all
}

// thousands writes a number as the page does.
func thousands(n uint64) string {
	text := strconv.FormatUint(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func namesAreText(t *testing.T, p *page, base string) {
	for _, screen := range []string{"/", "/engines", "/engines?source=" + url.QueryEscape("default.demo%2Fllama-sim."+strings.ReplaceAll(url.QueryEscape(trap), "+", "%20")+".0.engine")} {
		p.show(base + screen)
		eventually(t, "the name is shown as it is", func() bool {
			return strings.Contains(eval[string](p, `document.body.innerText`), trap)
		}, func() string { return eval[string](p, `document.body.innerText`) })
		if n := eval[int](p, `document.querySelectorAll("img[src=x]").length`); n > 0 || eval[string](p, `document.title`) == "1" {
			t.Errorf("%s: an engine's name became an element", screen)
		}
	}
}

// contractShown opens an engine's panel, and looks what its stream was seen to be.
func contractShown(t *testing.T, p *page, base string) {
	p.show(base + "/engines?source=" + url.QueryEscape("default.demo%2Fllama-sim.prefill-0.0.engine"))
	text := func() string { return strings.Join(p.texts("contract"), "\n") }
	eventually(t, "the contract is shown", func() bool {
		shown := text()
		return strings.Contains(shown, "vllm") && strings.Contains(shown, "map") && strings.Contains(shown, "uint64") &&
			strings.Contains(shown, "16 tokens a block") && strings.Contains(shown, "fields seen")
	}, text)
}

func tailFilters(t *testing.T, p *page, base string) {
	p.show(base + "/tail?source=decode-*&kinds=EVICTED")
	eventually(t, "evictions are shown", func() bool { return len(p.texts("tail-row")) >= 5 }, func() string { return "" })
	for _, row := range p.texts("tail-row") {
		if !strings.Contains(row, "EVICTED") || !strings.Contains(row, "decode-") {
			t.Errorf("the filter let through: %s", row)
		}
	}
	if shown, matched := p.number("tail-shown"), p.number("tail-matched"); shown <= 0 || matched < shown {
		t.Errorf("shown %v of %v", shown, matched)
	}
}

// transfersShown waits until loads are told from prefill to decode engines, and checks the page against history.
func transfersShown(t *testing.T, p *page, base string) {
	p.show(base + "/")
	p.do("go to Transfers by keys", chromedp.KeyEvent("gr"))
	eventually(t, "loads are told", func() bool {
		return len(p.texts("transfer-row")) > 0 && len(p.texts("slow-row")) > 0 && p.number("transfers-rate") > 0 && p.number("transfers-p99") > 0
	}, func() string { return eval[string](p, `document.body.innerText`) })
	if at := eval[string](p, `location.pathname`); at != "/transfers" {
		t.Errorf("g r leads to %s", at)
	}
	ways := eval[[][2]string](p, fmt.Sprintf(`[...document.querySelectorAll(%q)].map(r => [r.dataset.from, r.dataset.to])`, at("transfer-row")))
	known := func() string {
		var known strings.Builder
		for _, row := range get[history.Answer](t, base+"/v1/query/loads?since=10m").Rows {
			fmt.Fprintln(&known, row...)
		}
		return known.String()
	}
	for _, way := range ways {
		if !strings.HasPrefix(way[0], "prefill-") || !strings.HasPrefix(way[1], "decode-") {
			t.Errorf("a load from %q to %q", way[0], way[1])
		}
		eventually(t, "history has the pair", func() bool {
			for row := range strings.Lines(known()) {
				if strings.Contains(row, way[0]) && strings.Contains(row, way[1]) {
					return true
				}
			}
			return false
		}, known)
	}
	p.do("filter", chromedp.SendKeys(chromedp.CSS(at("transfer-filter")), ways[0][1]))
	eventually(t, "the filter holds", func() bool {
		rows := p.texts("transfer-row")
		for _, row := range rows {
			if !strings.Contains(row, ways[0][1]) {
				return false
			}
		}
		return len(rows) > 0
	}, func() string { return strings.Join(p.texts("transfer-row"), "\n") })
	p.show(base + "/")
	eventually(t, "Pulse tells the loads", func() bool { return p.number("loads") > 0 }, func() string { return strings.Join(p.texts("loads"), "\n") })
}

func queryRuns(t *testing.T, p *page, base string) {
	eventually(t, "history has evictions", func() bool {
		return len(get[history.Answer](t, base+"/v1/query/evictions?since=10m").Rows) >= 4
	}, func() string { return "" })
	since, until := time.Now().Add(-10*time.Minute).UnixMilli(), time.Now().UnixMilli()
	window := fmt.Sprintf("since=%d&until=%d", since, until)
	p.show(base + "/history?query=evictions&" + window)
	eventually(t, "rows", func() bool { return len(p.texts("history-row")) > 0 }, func() string { return eval[string](p, `document.body.innerText`) })
	answer := get[history.Answer](t, base+"/v1/query/evictions?"+window)
	rows := p.texts("history-row")
	if len(rows) != len(answer.Rows) {
		t.Fatalf("%d rows on the page, %d in the API", len(rows), len(answer.Rows))
	}
	for i, row := range answer.Rows {
		for _, cell := range []string{row[1].(string), thousands(uint64(row[3].(float64)))} {
			if !strings.Contains(rows[i], cell) {
				t.Errorf("row %d lacks %q: %s", i, cell, rows[i])
			}
		}
	}
}

func explainTells(t *testing.T, p *page, base string) {
	tail := command(t, "query", "lifetimes", "--server", base)
	if tail.code != exitOK {
		t.Fatalf("%+v", tail)
	}
	p.show(base + "/tail?kinds=EVICTED")
	eventually(t, "an eviction", func() bool { return len(p.texts("tail-row")) > 0 }, func() string { return "" })
	hash := eval[string](p, `document.querySelector('[data-testid="tail-row"] a[href^="/explain/"]').getAttribute("href").split("/")[2]`)
	eventually(t, "history has it", func() bool {
		story := get[history.Story](t, base+"/v1/explain/"+hash)
		return strings.Contains(strings.Join(story.Summary, " "), "Evicted")
	}, func() string { return hash })
	p.show(base + "/explain/" + hash)
	eventually(t, "the story", func() bool { return strings.Contains(strings.Join(p.texts("explain-summary"), " "), "Evicted") },
		func() string { return eval[string](p, `document.body.innerText`) })
	events := strings.Join(p.texts("explain-event"), "\n")
	if !strings.Contains(events, "STORED") || !strings.Contains(events, "EVICTED") {
		t.Errorf("the events are\n%s", events)
	}
	cli := command(t, "explain", hash, "--server", base)
	if cli.code != exitOK || !strings.Contains(cli.stdout, "Evicted") || !strings.Contains(cli.stdout, "STORED") {
		t.Errorf("kvstrata explain: %+v", cli)
	}
}

func reloadRestores(t *testing.T, p *page, base string) {
	p.show(base + "/engines")
	p.do("filter", chromedp.SendKeys(chromedp.CSS(at("engine-filter")), "decode-1"))
	filtered := func() bool {
		rows := p.texts("engine-row")
		return len(rows) == 2 && strings.Contains(rows[0], "decode-1") && strings.Contains(rows[1], "decode-1")
	}
	eventually(t, "the filter holds", filtered, func() string { return strings.Join(p.texts("engine-row"), "\n") })
	before := eval[string](p, `location.href`)
	p.do("reload", chromedp.Reload())
	p.live()
	eventually(t, "the filter holds after a reload", filtered, func() string { return strings.Join(p.texts("engine-row"), "\n") })
	if after := eval[string](p, `location.href`); after != before || !strings.Contains(after, "decode-1") {
		t.Errorf("the address was %s and is %s", before, after)
	}
}

// accessible holds every screen against axe-core's rules in both themes, and against a narrow window.
func accessible(t *testing.T, p *page, base string) {
	axe, err := os.ReadFile(filepath.FromSlash("../../web/ui/node_modules/axe-core/axe.min.js"))
	if err != nil {
		t.Fatalf("%v; make setup-test installs it", err)
	}
	hash := get[struct{ Rows []prefix.HotPrefix }](t, base+"/v1/prefixes?limit=1").Rows[0].Prefix.String()
	screens := []string{
		"/", "/engines", "/engines?source=default.demo%252Fllama-sim.prefill-0.0.engine", "/transfers", "/transfers?q=nobody", "/prefixes", "/history?query=events",
		"/history?query=lifetimes", "/explain", "/explain/" + hash, "/tail",
	}
	for _, theme := range []string{"light", "dark"} {
		for _, screen := range screens {
			p.show(base + screen)
			eval[chromedp.Void](p, fmt.Sprintf(`document.documentElement.dataset.theme = %q`, theme))
			eval[chromedp.Void](p, string(axe))
			found := eval[[]string](p, `axe.run().then(r => r.violations.map(v => v.id + ": " + v.nodes.map(n => n.target + " " + n.failureSummary).join("; ")))`)
			for _, violation := range found {
				t.Errorf("%s, %s: %s", screen, theme, violation)
			}
		}
	}
	p.do("narrow", chromedp.EmulateViewport(400, 800))
	for _, screen := range screens {
		p.show(base + screen)
		if wide := eval[int](p, `document.scrollingElement.scrollWidth`); wide > 400 {
			t.Errorf("%s is %d pixels wide in a window of 400", screen, wide)
		}
	}
	p.do("wide again", chromedp.EmulateViewport(1440, 900))
}

// engineDies kills the embedded ClickHouse engine, and then stops it: each is seen on the page and mends itself, while the
// index goes on.
func engineDies(t *testing.T, p *page, base string) {
	p.show(base + "/")
	state := func() string {
		return eval[string](p, fmt.Sprintf(`document.querySelector(%q)?.dataset.state ?? ""`, at("service-history")))
	}
	eventually(t, "history is well", func() bool { return state() == "ok" }, state)
	kill(t, running(t, historyEngineArg), syscall.SIGKILL)
	eventually(t, "its death is seen", func() bool { return state() != "ok" }, state)
	eventually(t, "it is well again", func() bool { return state() == "ok" }, state)
	pid := running(t, historyEngineArg)
	kill(t, pid, syscall.SIGSTOP)
	eventually(t, "that it is wedged is seen", func() bool { return state() != "ok" }, state)
	first := seqs(t, base)
	eventually(t, "the index goes on", func() bool {
		for id, seq := range seqs(t, base) {
			if seq > first[id] {
				return true
			}
		}
		return false
	}, func() string { return "" })
	kill(t, pid, syscall.SIGCONT)
	eventually(t, "it is well again", func() bool { return state() == "ok" }, state)
}
