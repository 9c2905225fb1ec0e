package publisher_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// told is a message as it travels where tokens are kept: judged, with the tokens still there.
func told(set *resident.Set, seq event.Seq, events ...event.Event) *event.Message {
	b := event.Batch{First: seq, Last: seq, Way: event.Live, Received: 1e18 + event.Time(seq)*12e6, Events: events}
	set.Judge(&b)
	return &event.Message{
		Source:  event.Source{Cluster: "c", Model: "m", Instance: "i", Rank: 2, Origin: event.Engine},
		Batches: []event.Batch{b},
	}
}

// storedRun is a STORED run of blocks of four tokens.
func storedRun(parent uint64, hashes ...uint64) event.Event {
	ev := event.Event{
		Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: 4,
		HasParent: parent > 0, Parent: event.IntHash(parent),
	}
	for _, h := range hashes {
		ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(h), Copies: -1, Age: -1})
		for i := range uint32(4) {
			ev.Tokens = append(ev.Tokens, uint32(h)*4+i)
		}
	}
	return ev
}

func gone(tier event.Tier, hashes ...uint64) event.Event {
	ev := event.Event{Kind: event.Evicted, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID}
	for _, h := range hashes {
		ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(h), Copies: -1, Age: -1})
	}
	return ev
}

// What is written as Dynamo's recorder writes is read again to the same blocks, names and tiers.
func TestDynamoRecorderIsReadAgain(t *testing.T) {
	var out bytes.Buffer
	rec := publisher.NewDynamoRecorder(&out)
	set := resident.New(resident.DefaultConfig())
	host := storedRun(0, 1)
	host.Tier = event.CPU
	for _, m := range []*event.Message{
		told(set, 0, storedRun(0, 1, 2), storedRun(2, 3), storedRun(0, 1)),
		told(set, 1, host, gone(event.GPU, 1)), // a copy is left
		told(set, 2, gone(event.GPU, 3, 1), event.Event{Kind: event.Loaded, Tier: event.GPU}),
	} {
		if err := rec.Write(m); err != nil {
			t.Fatal(err)
		}
	}
	lines := strings.SplitAfter(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) != 5 {
		t.Fatalf("%d lines, want 5 (no load, and no copy but the last):\n%s", len(lines), out.String())
	}
	cfg := resident.DefaultConfig()
	cfg.AsSet = true // Dynamo tells each store, and only the last copy's end
	again := resident.New(cfg)
	d := subscriber.NewDecoder(subscriber.DecoderConfig{BlockSize: 4})
	for i, line := range lines {
		b := event.Batch{First: event.Seq(i), Last: event.Seq(i)}
		if err := d.Decode([]byte(line), &b); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if b.Rank != 2 {
			t.Errorf("rank %d", b.Rank)
		}
		again.Judge(&b)
	}
	if odd := append(d.Oddities(), again.Oddities()...); len(odd) > 0 {
		t.Errorf("oddities %+v", odd)
	}
	names := func(s *resident.Set) map[string]event.PrefixHash {
		got := make(map[string]event.PrefixHash)
		for e := range s.Resident() {
			got[e.Hash.String()+" "+string(e.Tier)] = e.Prefix
		}
		return got
	}
	if diff := cmp.Diff(names(set), names(again)); diff != "" {
		t.Errorf("-told +read again\n%s", diff)
	}
}

func TestDynamoRecorderSaysWhatItCannotWrite(t *testing.T) {
	set := resident.New(resident.DefaultConfig())
	m := told(set, 0, storedRun(0, 1))
	m.Batches[0].Events[0].Tokens = nil
	rec := publisher.NewDynamoRecorder(new(bytes.Buffer))
	if err := rec.Write(m); err != nil || rec.Unwritten != 1 {
		t.Errorf("without tokens: %v, %d unwritten", err, rec.Unwritten)
	}
	cfg := resident.DefaultConfig()
	cfg.Hasher = event.NewHasher("key")
	if err := rec.Write(told(resident.New(cfg), 0, storedRun(0, 1))); err == nil || !strings.Contains(err.Error(), "--hash-key") {
		t.Errorf("with a key: %v", err)
	}
}

// Only what an event put there is told, and what it did put there is a chain that Dynamo can follow.
func TestDynamoRecorderTellsWhatIsThere(t *testing.T) {
	asSet := resident.DefaultConfig()
	asSet.AsSet = true
	cfg := resident.DefaultConfig()
	remote := storedRun(0, 1, 2)
	remote.Locality = event.Remote
	renamed := storedRun(0, 5, 2, 6) // 2 was told under 1
	for name, tt := range map[string]struct {
		cfg       resident.Config
		events    []event.Event
		want      string // chains, as parent:block,block
		unwritten uint64
	}{
		"a re-report":                  {asSet, []event.Event{storedRun(0, 1, 2, 3), storedRun(0, 1, 2, 3)}, ":1,2,3", 0},
		"a re-report that leads":       {asSet, []event.Event{storedRun(0, 1, 2), storedRun(0, 1, 2, 3, 4)}, ":1,2 2:3,4", 0},
		"a re-report amid":             {asSet, []event.Event{storedRun(0, 1, 2, 3), gone(event.GPU, 1, 3), storedRun(0, 1, 2, 3)}, ":1,2,3 :1 2:3", 0},
		"blocks elsewhere":             {cfg, []event.Event{remote}, "", 0},
		"a name that differs":          {cfg, []event.Event{storedRun(0, 1, 2), renamed}, ":1,2 :5", 1},
		"names that came later":        {cfg, []event.Event{storedRun(1, 2), storedRun(0, 1)}, ":1", 1},
		"under a name that differs so": {cfg, []event.Event{storedRun(0, 1, 2), renamed, storedRun(1, 7)}, ":1,2 :5 1:7", 1},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			rec := publisher.NewDynamoRecorder(&out)
			set := resident.New(tt.cfg)
			for i, ev := range tt.events {
				if err := rec.Write(told(set, event.Seq(i), ev)); err != nil {
					t.Fatal(err)
				}
			}
			if got := storedChains(t, out.String()); got != tt.want || rec.Unwritten != tt.unwritten {
				t.Errorf("told %q, want %q; %d unwritten, want %d", got, tt.want, rec.Unwritten, tt.unwritten)
			}
		})
	}
}

// storedChains writes the stored lines of a recording as parent:block,block.
func storedChains(t *testing.T, recording string) string {
	t.Helper()
	var chains []string
	for line := range strings.Lines(recording) {
		var l struct {
			Event struct {
				Event struct {
					Data struct {
						Stored *struct {
							Parent *uint64 `json:"parent_hash"`
							Blocks []struct {
								Hash uint64 `json:"block_hash"`
							}
						}
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatal(err)
		}
		stored := l.Event.Event.Data.Stored
		if stored == nil {
			continue
		}
		parent := ""
		if stored.Parent != nil {
			parent = fmt.Sprint(*stored.Parent)
		}
		var blocks []string
		for _, b := range stored.Blocks {
			blocks = append(blocks, fmt.Sprint(b.Hash))
		}
		chains = append(chains, parent+":"+strings.Join(blocks, ","))
	}
	return strings.Join(chains, " ")
}
