package sim_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/sim"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Scenarios: requests go in, the batches come out. Blocks hold 4 tokens.
func TestEngineStories(t *testing.T) {
	tests := []struct {
		name   string
		usable int
		edit   func(*sim.EngineConfig)
		play   func(*testing.T, *sim.Engine)
		want   []string
	}{
		{
			name: "a prompt is cached whole in its first step", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 10), Output: 1})
				step(t, e, 1, 2)
			},
			want: []string{"1: STORED a b"},
		},
		{
			name: "blocks fill while tokens are generated; the last one is never computed", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				// 6 + 3 tokens, of which 8 are computed: the prompt in step 1, one each in steps 2 and 3.
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 6), Output: 3})
				step(t, e, 1, 4)
			},
			want: []string{"1: STORED a", "3: STORED a→ b"},
		},
		{
			name: "a cached prefix is not stored again", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 9)})
				step(t, e, 1, 1)
				submit(t, e, sim.Request{ID: "2", Prompt: append(prompt(0, 8), 77, 78, 79, 80)})
				step(t, e, 2, 1)
			},
			want: []string{"1: STORED a b", "2: STORED b→ c"},
		},
		{
			name: "a cached prompt that ends with its block computes that block again: a second copy", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 8)})
				step(t, e, 1, 1)
				submit(t, e, sim.Request{ID: "2", Prompt: prompt(0, 8)})
				step(t, e, 2, 1)
			},
			want: []string{"1: STORED a b", "2: STORED a→ b"},
		},
		{
			name: "requests of one step share what the first of them has just allocated", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 9)}, sim.Request{ID: "2", Prompt: prompt(0, 9)})
				step(t, e, 1, 1)
			},
			want: []string{"1: STORED a b"},
		},
		{
			name: "the tail of a prefix goes first, and one copy at a time", usable: 4,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 12)}) // a b c
				step(t, e, 1, 1)
				submit(t, e, sim.Request{ID: "2", Prompt: prompt(100, 8)}) // d in the unused block, e instead of c
				step(t, e, 2, 1)
				submit(t, e, sim.Request{ID: "3", Prompt: prompt(200, 8)}) // instead of b and a
				step(t, e, 3, 1)
			},
			want: []string{"1: STORED a b c", "2: EVICTED c, STORED d e", "3: EVICTED b a, STORED f g"},
		},
		{
			name: "of two copies the older is found, and each is evicted by itself", usable: 4,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 4)})
				step(t, e, 1, 1)
				submit(t, e, sim.Request{ID: "2", Prompt: prompt(0, 4)}) // a again, in another block
				step(t, e, 2, 1)
				submit(t, e, sim.Request{ID: "3", Prompt: prompt(0, 5)}) // touches the older copy
				step(t, e, 3, 1)
				// The queue: request 3's partial block, the unused block, the younger copy, the older copy.
				submit(t, e, sim.Request{ID: "4", Prompt: prompt(100, 12)})
				step(t, e, 4, 1)
				submit(t, e, sim.Request{ID: "5", Prompt: prompt(200, 4)})
				step(t, e, 5, 1)
			},
			want: []string{"1: STORED a", "2: STORED a", "4: EVICTED a, STORED b c d", "5: EVICTED a, STORED e"},
		},
		{
			name: "a prompt in chunks is admitted when all of it fits", usable: 4,
			edit: func(c *sim.EngineConfig) { c.TokensPerStep = 6 },
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 4), Output: 2}, sim.Request{ID: "2", Prompt: prompt(100, 16)})
				step(t, e, 1, 5) // request 1 runs in steps 1 and 2, and leaves room for a chunk
			},
			want: []string{"1: STORED a", "3: STORED b", "4: STORED b→ c d", "5: EVICTED a, STORED d→ e"},
		},
		{
			name: "a prompt in chunks is stored chunk by chunk, partial blocks when they are full", usable: 8,
			edit: func(c *sim.EngineConfig) { c.TokensPerStep = 6 },
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 14)}, sim.Request{ID: "2", Prompt: prompt(100, 4)})
				step(t, e, 1, 4)
			},
			want: []string{"1: STORED a", "2: STORED a→ b c", "3: STORED d"},
		},
		{
			name: "an external prompt is cached once loaded, its last token computed after that", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 12), Output: 2, External: true})
				step(t, e, 1, 3)
			},
			want: []string{"2: STORED a b, STORED b→ c"},
		},
		{
			name: "an external prompt loads only what is not cached", usable: 8,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 8)})
				step(t, e, 1, 1)
				submit(t, e, sim.Request{ID: "2", Prompt: prompt(0, 13), External: true})
				step(t, e, 2, 2)
			},
			want: []string{"1: STORED a b", "3: STORED b→ c"},
		},
		{
			name: "the newest gives way, and starts over with what is left of its blocks", usable: 4,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 7), Output: 6}, sim.Request{ID: "2", Prompt: prompt(100, 7), Output: 2})
				step(t, e, 1, 2) // both fill their second block: the pool is full
				p := step(t, e, 3, 1)
				if diff := cmp.Diff(sim.Progress{Scheduled: 1, Tokens: 1}, p); diff != "" {
					t.Errorf("step 3 (-want +got):\n%s", diff)
				}
			},
			want: []string{"1: STORED a, STORED b", "2: STORED a→ c, STORED b→ d", "3: EVICTED d"},
		},
		{
			name: "reset forgets everything", usable: 4,
			play: func(t *testing.T, e *sim.Engine) {
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 9), Output: 2})
				step(t, e, 1, 1)
				if ok, err := e.Reset(2); ok || err != nil {
					t.Errorf("reset while a request runs: %v, %v", ok, err)
				}
				step(t, e, 3, 1)
				if ok, err := e.Reset(4); !ok || err != nil {
					t.Errorf("reset of an idle engine: %v, %v", ok, err)
				}
				submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 9)})
				step(t, e, 5, 1)
			},
			want: []string{"1: STORED a b", "4: CLEARED", "5: STORED a b"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			edit := test.edit
			if edit == nil {
				edit = func(*sim.EngineConfig) {}
			}
			e, r := newEngine(t, test.usable, edit)
			test.play(t, e)
			if diff := cmp.Diff(test.want, r.story()); diff != "" {
				t.Errorf("batches (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(r.copies(t), resident(e)); diff != "" {
				t.Errorf("resident set (-by events +by pool):\n%s", diff)
			}
		})
	}
}

func TestEnginePreemption(t *testing.T) {
	e, r := newEngine(t, 4)
	submit(t, e,
		sim.Request{ID: "old", Prompt: prompt(0, 7), Output: 6},
		sim.Request{ID: "new", Prompt: prompt(100, 7), Output: 6})
	var got []string
	for now := event.Time(1); e.Busy(); now++ {
		p := step(t, e, now, 1)
		line := fmt.Sprintf("%d: %d scheduled, %d tokens, %d preempted", now, p.Scheduled, p.Tokens, p.Preempted)
		for _, f := range p.Finished {
			line += ", done " + f.ID
		}
		got = append(got, line)
	}
	want := []string{
		"1: 2 scheduled, 14 tokens, 0 preempted",
		"2: 2 scheduled, 2 tokens, 0 preempted",
		"3: 1 scheduled, 1 tokens, 1 preempted", // 9 tokens each want a third block: the new one gives way
		"4: 1 scheduled, 1 tokens, 0 preempted", // and waits, as 9 tokens do not fit beside the old one
		"5: 1 scheduled, 1 tokens, 0 preempted",
		"6: 1 scheduled, 1 tokens, 0 preempted, done old",
		"7: 1 scheduled, 5 tokens, 0 preempted", // its first block is still cached, the second was taken
		"8: 1 scheduled, 1 tokens, 0 preempted",
		"9: 1 scheduled, 1 tokens, 0 preempted",
		"10: 1 scheduled, 1 tokens, 0 preempted, done new",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	wantStats := sim.EngineStats{
		Submitted: 2, Finished: 2, Preempted: 1, PromptTokens: 14, ComputedTokens: 28, GeneratedTokens: 12,
		BlockLookups: 2, BlocksStored: 7, BlocksEvicted: 3, Batches: uint64(len(r.batches)),
	}
	if diff := cmp.Diff(wantStats, e.Stats()); diff != "" {
		t.Errorf("stats (-want +got):\n%s", diff)
	}
}

func TestEngineRefuses(t *testing.T) {
	e, _ := newEngine(t, 4, func(c *sim.EngineConfig) { c.MaxWaiting = 2 })
	submit(t, e, sim.Request{ID: "fits exactly", Prompt: prompt(0, 10), Output: 7})
	tests := []struct {
		request sim.Request
		want    error
	}{
		{sim.Request{ID: "long prompt", Prompt: prompt(0, 17)}, sim.ErrTooLong},
		{sim.Request{ID: "long output", Prompt: prompt(0, 10), Output: 8}, sim.ErrTooLong},
		{sim.Request{ID: "endless output", Prompt: prompt(0, 10), Output: int(^uint(0) >> 1)}, sim.ErrTooLong},
		{sim.Request{ID: "nothing"}, sim.ErrEmptyPrompt},
		{sim.Request{ID: "fits exactly", Prompt: prompt(0, 1)}, sim.ErrDuplicateID},
		{sim.Request{ID: "second", Prompt: prompt(0, 1), Output: -3}, nil},
		{sim.Request{ID: "third", Prompt: prompt(0, 1)}, sim.ErrQueueFull},
	}
	for _, test := range tests {
		if err := e.Submit(test.request); !errors.Is(err, test.want) {
			t.Errorf("submit %q: %v, want %v", test.request.ID, err, test.want)
		}
	}
	for now := event.Time(1); e.Busy(); now++ {
		step(t, e, now, 1)
	}
	if s := e.Stats(); s.Refused != 6 || s.Finished != 2 || s.Submitted != 2 {
		t.Errorf("stats %+v, want 6 refused and 2 finished", s)
	}
}

func TestEngineEvents(t *testing.T) {
	e, r := newEngine(t, 8, func(c *sim.EngineConfig) { c.ReportGroup = true })
	tokens := prompt(0, 9)
	submit(t, e, sim.Request{
		ID: "1", Prompt: tokens, LoRA: "sql", Salt: strings.Repeat("s", 40), Session: "chat-7",
	})
	step(t, e, 5, 1)
	ignoreHash := cmpopts.IgnoreFields(event.Block{}, "Hash")
	salted, _ := hex.DecodeString("92a373716c" + "d928" + strings.Repeat("73", 40))
	plain, _ := hex.DecodeString("91a373716c")
	want := []*event.Batch{{
		Time: 5,
		Events: []event.Event{{
			Kind: event.Stored, Blocks: []event.Block{{Copies: -1, Age: -1}, {Copies: -1, Age: -1}},
			Tier: event.GPU, Group: 0, Spec: event.SpecFull, BlockSize: 4, LoRA: "sql", LoRAID: event.NoLoRAID,
			Session: "chat-7", Tokens: tokens[:8], ExtraKeys: [][]byte{salted, plain},
		}},
	}}
	if diff := cmp.Diff(want, r.batches, ignoreHash, cmp.AllowUnexported(event.BlockHash{})); diff != "" {
		t.Errorf("batches (-want +got):\n%s", diff)
	}
}

// The generated tokens in a STORED are those that a conversation's next prompt will hold.
func TestEngineGeneratesWhatAppendOutputSays(t *testing.T) {
	e, r := newEngine(t, 8)
	history := prompt(0, 6)
	submit(t, e, sim.Request{ID: "turn-1", Prompt: history, Output: 11})
	step(t, e, 1, 11)
	history = sim.AppendOutput(history, "turn-1", 11)
	var told []uint32
	for _, b := range r.batches {
		for _, ev := range b.Events {
			told = append(told, ev.Tokens...)
		}
	}
	if diff := cmp.Diff(history[:16], told); diff != "" {
		t.Errorf("tokens of the stored blocks (-want +got):\n%s", diff)
	}
	for _, token := range history[6:] {
		if token < 1<<17 || token >= 1<<18 {
			t.Errorf("generated token %d lies among the tokens of prompts", token)
		}
	}
	submit(t, e, sim.Request{ID: "turn-2", Prompt: history})
	step(t, e, 20, 1)
	if s := e.Stats(); s.BlockHits != 4 {
		t.Errorf("the next turn finds %d blocks, want 4", s.BlockHits)
	}
}

// hashesOf returns what an engine calls the blocks of one request.
func hashesOf(t *testing.T, r sim.Request, edit func(*sim.EngineConfig)) []event.BlockHash {
	t.Helper()
	e, rec := newEngine(t, 8, edit)
	submit(t, e, r)
	step(t, e, 1, 1)
	var hashes []event.BlockHash
	for _, block := range rec.batches[0].Events[0].Blocks {
		hashes = append(hashes, block.Hash)
	}
	return hashes
}

// As in vLLM, a salt and an adapter of the same name would give block 0 the same hash: its extra keys have no labels.
func TestEngineHashes(t *testing.T) {
	base := sim.Request{ID: "1", Prompt: prompt(0, 8)}
	with := func(edit func(*sim.Request)) sim.Request { r := base; edit(&r); return r }
	seeded := func(c *sim.EngineConfig) { c.HashSeed = 9 }
	plain := func(*sim.EngineConfig) {}
	names := map[event.BlockHash]string{}
	for name, hashes := range map[string][]event.BlockHash{
		"plain":        hashesOf(t, base, plain),
		"seed":         hashesOf(t, base, seeded),
		"lora":         hashesOf(t, with(func(r *sim.Request) { r.LoRA = "x" }), plain),
		"salt":         hashesOf(t, with(func(r *sim.Request) { r.Salt = "y" }), plain),
		"both":         hashesOf(t, with(func(r *sim.Request) { r.LoRA, r.Salt = "x", "y" }), plain),
		"other prompt": hashesOf(t, with(func(r *sim.Request) { r.Prompt = append([]uint32{9}, prompt(1, 7)...) }), plain),
	} {
		for i, h := range hashes {
			if other, ok := names[h]; ok {
				t.Errorf("block %d of %q is called as one of %q", i, name, other)
			}
			names[h] = name
		}
	}
	again := hashesOf(t, with(func(r *sim.Request) { r.ID = "2" }), plain)
	long := hashesOf(t, base, func(c *sim.EngineConfig) { c.HashBytes = true })
	for i, h := range hashesOf(t, base, plain) {
		if h != again[i] {
			t.Errorf("block %d has another hash in another engine with the same seed", i)
		}
		if long[i].Len() != 32 || !strings.HasSuffix(long[i].String(), h.String()) {
			t.Errorf("block %d: byte hash %v does not end with the integer %v", i, long[i], h)
		}
	}
}

func TestEngineConfigValidate(t *testing.T) {
	if err := sim.DefaultEngineConfig().Validate(); err != nil {
		t.Errorf("the default configuration: %v", err)
	}
	_, err := sim.NewEngine(sim.EngineConfig{PoolBlocks: 1, TokensPerStep: -1}, &counter{})
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"engine name: is empty",
		"pool-blocks 1: want 2 to 2147483647",
		"block-size 0: want 1 to 65536 tokens",
		"max-running 0: want at least 1",
		"max-waiting 0: want at least 1",
		"tokens-per-step -1: want 0 (no chunked prefill) or more",
	}
	if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

func TestEnginePublishError(t *testing.T) {
	e, r := newEngine(t, 8)
	r.failAt = 1
	submit(t, e, sim.Request{ID: "1", Prompt: prompt(0, 8)})
	if _, err := e.Step(1); !errors.Is(err, errPublish) {
		t.Errorf("step: %v, want the publisher's error", err)
	}
}
