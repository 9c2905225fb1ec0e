package interop_test

import (
	"fmt"
	"slices"
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// TestEveryField publishes every field that a release's events have, and holds what arrives behind NATS against it,
// judgement included: effects, copies left, ages, prefix hashes. Tokens and extra keys arrive only when they are kept.
func TestEveryField(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		for _, keep := range []bool{false, true} {
			t.Run(map[bool]string{false: "drop", true: "keep"}[keep], func(t *testing.T) {
				t.Parallel()
				everyField(t, v, keep)
			})
		}
	})
}

func everyField(t *testing.T, v version, keep bool) {
	const rank = 2 // vLLM adds it to the ports, and tells it in each batch
	port := freePorts(t, 2*(rank+1))
	e := startVLLM(t, v, args{
		"endpoint": fmt.Sprintf("tcp://*:%d", port), "replay_endpoint": fmt.Sprintf("tcp://*:%d", port+rank+1), "dp_rank": rank,
		"topic": "kv@pod-1@" + model,
	})
	r := newRig(t)
	cfg := quiet()
	cfg.KeepTokens = keep
	r.listen(cfg, e)

	plain := prompt(1, 5*16)
	lora, salt := "my-lora", "tenant-a"
	adapted := prompt(2, 4*16)
	root := stored(run{tokens: plain[:48]}, ints(1<<63+1, 127, 1<<64-1)...)
	root.Group, root.Spec, root.Session, root.Locality = 0, event.SpecFull, "s-42", event.Local
	root.ExtraKeys = [][]byte{nil, nil, nil}
	mixed := stored(run{tokens: plain[48:], parent: &root.Blocks[2].Hash}, digest(4), event.IntHash(5))
	mixed.Group, mixed.Spec = 0, event.SpecFull
	e.publish(root, mixed)

	// LoRA, multimodal items, salt and embeddings; the next run inherits the salt.
	keyed := stored(run{tokens: adapted[:48], lora: lora}, digest(10), digest(11), digest(12))
	keyed.Group, keyed.LoRAID, keyed.Salt = 0, 7, salt
	embeds := []byte("\x00\x01\x02\x03 thirty-two bytes of a hash")
	keyed.ExtraKeys = [][]byte{
		keys(lora, []any{"image-1", 3}, salt), keys(lora, []any{"image-1", -13}, []any{"image-2", 5}), keys(lora, embeds),
	}
	keyed.Terms = []uint64{
		event.ExtraTerm(keys([]any{"image-1", 3})), event.ExtraTerm(keys([]any{"image-1", -13}, []any{"image-2", 5})),
		event.ExtraTerm(keys(embeds)),
	}
	after := stored(run{tokens: adapted[48:], parent: &keyed.Blocks[2].Hash, lora: lora}, digest(13))
	after.Group, after.LoRAID, after.ExtraKeys = 0, 7, [][]byte{keys(lora)}
	e.publish(keyed)
	e.publish(after)

	salted := stored(run{tokens: plain[:32]}, ints(20, 21)...)
	salted.Salt, salted.ExtraKeys, salted.Group = salt, [][]byte{keys(salt), nil}, 0
	window := stored(run{tokens: plain[:64]}, ints(1<<63+1, 127, 1<<64-1, 30)...)
	window.Group, window.Spec, window.Window = 1, event.SpecSlidingWindow, 4096
	e.publish(salted, window)

	// Copies in other tiers: placeholders of known and unknown blocks, and a second copy of a block on the GPU.
	e.publish(offloaded(event.CPU, root.Blocks[0].Hash, root.Blocks[1].Hash, event.IntHash(77)), offloaded(event.CPU, digest(11)))
	second := root
	second.Tokens, second.Blocks, second.ExtraKeys, second.Session = plain[:16], root.Blocks[:1], nil, ""
	shared := offloaded(event.Storage, digest(10))
	shared.Ownership, shared.Locality = "tier-1", event.Local
	remote := stored(run{tokens: plain[:16]}, event.IntHash(1<<63+1))
	remote.Locality, remote.Ownership, remote.Tier, remote.ExtraKeys = event.Remote, "tier-2", event.CPU, [][]byte{nil}
	e.publish(second, shared)
	if slices.Contains(e.fields["BlockStored"], "locality") { // without it the block would count as the engine's own
		e.publish(remote)
	}

	// A chain whose root is told last.
	late := prompt(3, 48)
	found := stored(run{tokens: late[:16]}, event.IntHash(90))
	lost := stored(run{tokens: late[16:], parent: &found.Blocks[0].Hash}, ints(91, 92)...)
	found.Group, lost.Group = 0, 0
	e.publish(lost)
	e.publish(found)

	out := evicted(event.GPU, root.Blocks[0].Hash, digest(13), event.IntHash(404))
	out.Group = 0
	cold := evicted(event.Storage, digest(10))
	cold.Ownership, cold.Locality = "tier-1", event.Local
	e.publish(out, cold, evicted(event.CPU, event.IntHash(77), digest(11)))
	e.publish()
	e.publish(evicted("", root.Blocks[0].Hash)) // medium nil is the GPU; its second copy
	u := r.verify(e, r.settle(e, event.StateLive), keep)

	// The window's group holds the first four blocks of the plain prompt and nothing else: vLLM would use no more again. The names of all
	// blocks were compared above.
	for _, want := range []struct {
		name    string
		request prefix.Request
		blocks  int
		device  int
	}{
		{"the plain prompt, its first block on the CPU only", prefix.Request{Tokens: plain}, 4, 0},
		{"the chain whose root was told last", prefix.Request{Tokens: late}, 0, 0},
		{"with the salt", prefix.Request{Tokens: plain, Salt: salt}, 0, 0},
		{"with another salt", prefix.Request{Tokens: plain, Salt: "tenant-b"}, 0, 0},
		{"with an adapter", prefix.Request{Tokens: plain, LoRA: lora}, 0, 0},
		{"by the hashes of images", prefix.Request{Hashes: u.names(digest(10), digest(11), digest(12), digest(13))}, 0, 0},
	} {
		want.request.Model = model
		a, err := r.sink.index.Lookup(&want.request)
		if err != nil || len(a.Matches) != 1 {
			t.Fatalf("%s: %+v, %v", want.name, a, err)
		}
		if m := a.Matches[0]; m.Blocks != want.blocks || m.DeviceBlocks != want.device {
			t.Errorf("%s: %d blocks, %d of them on the device; want %d and %d", want.name, m.Blocks, m.DeviceBlocks, want.blocks, want.device)
		}
	}

	e.publish(cleared())
	e.publish(root)
	r.verify(e, r.settle(e, event.StateLive), keep)
	checkOddities(t, r.sink.status())
}

// names returns the prefix hashes of blocks of group 0.
func (u *truth) names(hashes ...event.BlockHash) (all []event.PrefixHash) {
	for _, h := range hashes {
		all = append(all, u.chains[block{h, 0}].prefix())
	}
	return all
}

// checkOddities allows only what the story asked for.
func checkOddities(t *testing.T, st *event.Status) {
	t.Helper()
	for _, c := range st.Counters {
		if !slices.Contains([]string{"evicted_absent_block", "parent_unknown"}, c.Name) {
			t.Errorf("oddity %+v", c)
		}
	}
}
