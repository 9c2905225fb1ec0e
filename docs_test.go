package kvstrata_test

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"kvstrata/bus"
	"kvstrata/connector"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis"
	"kvstrata/connector/store"
	"kvstrata/connector/tcp"
	"kvstrata/connector/transports"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/history"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash(name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// exampleTold is what the engine of docs/format/event.md's example told, and exampleJudged what its subscriber made of
// it.
func exampleTold() []event.Batch {
	raw := func(hashes ...event.BlockHash) (blocks []event.Block) {
		for _, h := range hashes {
			blocks = append(blocks, event.Block{Hash: h, Copies: -1, Age: -1})
		}
		return blocks
	}
	first, second := event.IntHash(0x6d4fa0e5fdb93342), event.IntHash(0x3e9)
	third := event.BytesHash("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f" +
		"\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f")
	const began event.Time = 1_789_095_808_500_000_000
	return []event.Batch{
		{
			First: 41, Last: 41, Way: event.Live, Time: began, Received: began + 600_000, Payload: 0x0123456789abcdef,
			Events: []event.Event{{
				Kind: event.Stored, Tier: event.GPU, LoRAID: event.NoLoRAID, BlockSize: 16, Spec: event.SpecFull, Session: "s-7",
				Tokens: counted(1, 32), Blocks: raw(first, second),
			}},
		},
		{
			First: 42, Last: 42, Way: event.Live, Time: began + 2_500_000_000, Received: began + 2_500_700_000,
			Payload: 0xfedcba9876543210,
			Events: []event.Event{
				{Kind: event.Evicted, Tier: event.GPU, LoRAID: event.NoLoRAID, Blocks: raw(second)},
				{
					Kind: event.Stored, Tier: event.GPU, LoRAID: event.NoLoRAID, BlockSize: 16, Spec: event.SpecFull,
					HasParent: true, Parent: first, Tokens: counted(101, 16), Blocks: raw(third),
				},
			},
		},
	}
}

func exampleJudged() []event.Batch {
	batches := exampleTold()
	stored, evicted, again := &batches[0].Events[0], &batches[1].Events[0], &batches[1].Events[1]
	stored.Seed, again.Seed = 1337, 1337
	stored.Tokens, again.Tokens = nil, nil
	stored.Blocks[0].Prefix, stored.Blocks[0].Effect = 0xea06fc71a5ee6e88, +1
	stored.Blocks[1].Prefix, stored.Blocks[1].Effect = 0xad01835a37dd294c, +1
	evicted.Blocks[0] = event.Block{
		Hash: evicted.Blocks[0].Hash, Prefix: 0xad01835a37dd294c, Effect: -1, Copies: 0, Age: 2_500_000_000,
	}
	again.Blocks[0].Prefix, again.Blocks[0].Effect = 0x82a5a962a4f9c5cb, +1
	return batches
}

// counted returns n tokens that count up.
func counted(first uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = first + uint32(i)
	}
	return tokens
}

func TestExampleOfTheEventFormat(t *testing.T) {
	listing, doc := read(t, "docs/format/example.hex"), read(t, "docs/format/event.md")
	if !strings.Contains(doc, listing) {
		t.Error("event.md does not show example.hex as it is")
	}
	var digits strings.Builder
	for line := range strings.Lines(listing) {
		code, _, _ := strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(code), ""))
	}
	payload, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	var dec event.Decoder
	got, err := dec.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(exampleJudged(), got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("example.hex decodes to something else (-want +got):\n%s", diff)
	}

	told := exampleTold()
	set := resident.New(resident.DefaultConfig())
	var enc event.Encoder
	for i := range told {
		set.Judge(&told[i])
		for j := range told[i].Events {
			told[i].Events[j].Tokens = nil
		}
		enc.Append(&told[i])
		if digest := fmt.Sprintf("%016x", uint64(set.Digest())); !strings.Contains(doc, digest) {
			t.Errorf("event.md does not tell the digest %s after sequence %d", digest, told[i].Last)
		}
	}
	if diff := cmp.Diff(exampleJudged(), told, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the judge says something else (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(hex.EncodeToString(payload), hex.EncodeToString(enc.Encode(nil))); diff != "" {
		t.Errorf("the encoder writes something else (-want +got):\n%s", diff)
	}
	head := bus.Head{Epoch: 1795974916294, Fence: 1795974916269, First: 41, Last: 42, Blocks: 4, HasDigest: true, Digest: set.Digest()}
	for name, values := range head.Header() {
		if want := name + ": " + values[0]; !strings.Contains(doc, want) {
			t.Errorf("event.md does not show the header %s", want)
		}
	}
}

// The vectors were computed a second time with the reference implementation of XXH3.
func TestVectorsOfTheEventFormat(t *testing.T) {
	doc := read(t, "docs/format/event.md")
	var public event.Hasher
	keyed := event.NewHasher("secret")
	block := counted(1, 4)
	chain := event.Prefixes(nil, counted(1, 12), 4, public.Seed("", ""), false)
	eagle := event.Prefixes(nil, counted(1, 9), 4, public.Seed("", ""), true)
	term := event.ExtraTerm([]byte("\x91\x92\xa3abc\x03"))
	entry := event.BytesHash(string(exampleTold()[1].Events[1].Blocks[0].Hash.AppendTo(nil)))
	tests := []struct {
		name      string
		got, want uint64
	}{
		{"local and prefix of 1–4", uint64(chain[0]), 14643705804678351452},
		{"local of 5–8", event.LocalHash(counted(5, 4), 1337), 16777012769546811212},
		{"prefix of 1–8", uint64(chain[1]), 4945711292740353085},
		{"local of 9–12", event.LocalHash(counted(9, 4), 1337), 483935686894639516},
		{"prefix of 1–12", uint64(chain[2]), 12583592247330656132},
		{"seed of my-lora", public.Seed("my-lora", ""), 12827409268353072861},
		{"under my-lora", event.LocalHash(block, public.Seed("my-lora", "")), 15671544057904749233},
		{"seed of tenant-a", public.Seed("", "tenant-a"), 1948188790972764086},
		{"under tenant-a", event.LocalHash(block, public.Seed("", "tenant-a")), 5738685477468498325},
		{"seed of both", public.Seed("my-lora", "tenant-a"), 14775598059325835610},
		{"under both", event.LocalHash(block, public.Seed("my-lora", "tenant-a")), 6157910915076630503},
		{"keyed seed", keyed.Seed("", ""), 8777600861084186567},
		{"keyed", event.LocalHash(block, keyed.Seed("", "")), 10150219795329259269},
		{"extra term", term, 9141230042356225254},
		{"with the extra term", event.LocalHash(block, 1337+term), 17560217309187911712},
		{"first EAGLE window", uint64(eagle[0]), 1914873892905420881},
		{"second EAGLE window", uint64(eagle[1]), 13136491855314414045},
		{"weight", uint64(event.Mix64(event.IntHash(0x6d4fa0e5fdb93342), event.NoGroup, event.GPU)), 1287156641467971375},
		{"weight of bytes", uint64(event.Mix64(entry, 2, event.CPU)), 6271971280314987549},
	}
	for _, tt := range tests {
		if tt.got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, tt.got, tt.want)
		}
		if !strings.Contains(doc, fmt.Sprint(tt.want)) {
			t.Errorf("%s: event.md does not give %d", tt.name, tt.want)
		}
	}
}

func TestSubjectsOfTheDocument(t *testing.T) {
	doc := read(t, "docs/format/subjects.md")
	for _, s := range []struct {
		kind   bus.Kind
		source event.Source
	}{
		{bus.Events, event.Source{Cluster: "default", Model: "demo/llama-sim", Instance: "prefill-0", Origin: event.Engine}},
		{bus.Status, event.Source{Cluster: "eu", Model: "meta/Llama-3.1", Instance: "10.0.0.1:8000", Rank: 3, Origin: event.Engine}},
		{bus.Control, event.Source{Model: "Größe", Instance: "a b>*%", Origin: event.Store}},
	} {
		if subject := bus.Subject(s.kind, s.source); !strings.Contains(doc, "`"+subject+"`") {
			t.Errorf("subjects.md does not show %s", subject)
		}
	}
}

// Environment variables of the code are documented.
func TestEveryVariableIsDocumented(t *testing.T) {
	configuration := read(t, "docs/configuration.md")
	variable := regexp.MustCompile(`env:"(\w+)"`)
	for _, file := range glob(t, "cmd/kvstrata/*.go") {
		for _, match := range variable.FindAllStringSubmatch(read(t, file), -1) {
			if !strings.Contains(configuration, "`"+match[1]+"`") {
				t.Errorf("docs/configuration.md does not name %s", match[1])
			}
		}
	}
}

// Files, tests and fuzz targets that documents name are there.
func TestDocumentsNameWhatThereIs(t *testing.T) {
	documents := slices.Concat(glob(t, "*.md"), glob(t, "docs/*.md"), glob(t, "docs/*/*.md"))
	link, target := regexp.MustCompile(`\]\(([^)#:]+)`), regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w+)`")
	var tests strings.Builder
	for _, file := range slices.Concat(glob(t, "*_test.go"), glob(t, "*/*_test.go"), glob(t, "*/*/*_test.go"), glob(t, "*/*/*/*_test.go")) {
		tests.WriteString(read(t, file))
	}
	for _, name := range documents {
		text := read(t, name)
		for _, match := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(name), filepath.FromSlash(match[1]))); err != nil {
				t.Errorf("%s: link: %v", name, err)
			}
		}
		for _, match := range target.FindAllStringSubmatch(text, -1) {
			if !strings.Contains(tests.String(), "func "+match[1]+"(") {
				t.Errorf("%s names %s, which is no test", name, match[1])
			}
		}
	}
	if lines := strings.Count(read(t, "README.md"), "\n"); lines > 150 {
		t.Errorf("README.md has %d lines, want at most 150", lines)
	}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: %d files, %v", pattern, len(names), err)
	}
	return names
}

// Named queries are documented.
func TestEveryQueryIsDocumented(t *testing.T) {
	doc := read(t, "docs/api.md")
	for _, q := range history.Queries() {
		if !strings.Contains(doc, "| `"+q.Name+"` |") {
			t.Errorf("docs/api.md does not list the query %s", q.Name)
		}
	}
}

// The transport that the guide shows is one that compiles and keeps the contract.
func TestTheGuideShowsARealTransport(t *testing.T) {
	if !strings.Contains(read(t, "docs/new-transport.md"), "```go\n"+read(t, "connector/store/memory_test.go")+"```\n") {
		t.Error("docs/new-transport.md does not show connector/store/memory_test.go as it is")
	}
}

// Transports, their configuration keys and the hooks are documented.
func TestConnectorsAreDocumented(t *testing.T) {
	doc := read(t, "docs/connectors.md")
	names := slices.Concat(transports.Default().Names(), store.Keys(), tcp.Keys(), redis.Keys(), lmcache.Keys())
	for _, half := range []reflect.Type{reflect.TypeFor[connector.Scheduler](), reflect.TypeFor[connector.Worker]()} {
		for i := range half.NumMethod() {
			names = append(names, half.Method(i).Name)
		}
	}
	for _, name := range names {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("docs/connectors.md does not name %s", name)
		}
	}
}
