package subscriber_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"

	"kvstrata/event"
)

// keys encodes one block's extra keys: strings, byte strings, and pairs of identifier and offset.
func keys(items ...any) []byte {
	b := msgp.AppendArrayHeader(nil, uint32(len(items)))
	for _, item := range items {
		switch v := item.(type) {
		case string:
			b = msgp.AppendString(b, v)
		case []byte:
			b = msgp.AppendBytes(b, v)
		case pair:
			b = msgp.AppendArrayHeader(b, 2)
			b = msgp.AppendString(b, v.id)
			if v.wide { // as an encoder that does not care for width writes it
				b = append(b, 0xd2, 0, 0, 0, byte(v.offset))
			} else {
				b = msgp.AppendUint64(b, uint64(v.offset))
			}
		}
	}
	return b
}

type pair struct {
	id     string
	offset int
	wide   bool
}

// TestExtraKeysArePartOfTheName publishes a root block under many extra keys, and compares its name with the formula of
// docs/format/event.md.
func TestExtraKeysArePartOfTheName(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	sink := newNames()
	r.consume(sink)
	r.subscribe(e.config("a"))
	image := keys(pair{id: "image", offset: 3})
	for i, c := range []struct {
		name, lora string
		keys       []byte
		seed       uint64
	}{
		{"none", "", nil, event.Hasher{}.Seed("", "")},
		{"lora", "adapter", keys("adapter"), event.Hasher{}.Seed("adapter", "")},
		{"salt", "", keys("salt"), event.Hasher{}.Seed("", "salt")},
		{"lora and salt", "adapter", keys("adapter", "salt"), event.Hasher{}.Seed("adapter", "salt")},
		{"salt named as the adapter", "x", keys("x", "x"), event.Hasher{}.Seed("x", "x")},
		{"image", "", image, event.Hasher{}.Seed("", "") + event.ExtraTerm(image)},
		{"image, offset in four bytes", "", keys(pair{id: "image", offset: 3, wide: true}), event.Hasher{}.Seed("", "") + event.ExtraTerm(image)},
		{"all", "adapter", keys("adapter", pair{id: "image", offset: 3}, "salt"), event.Hasher{}.Seed("adapter", "salt") + event.ExtraTerm(image)},
		{"embeddings", "", keys([]byte("digest")), event.Hasher{}.Seed("", "") + event.ExtraTerm(keys([]byte("digest")))},
		{"no array", "", []byte("\xa4text"), 0},
	} {
		b := storing(1, 1)
		ev := &b.Events[0]
		ev.Blocks[0].Hash = event.IntHash(uint64(100 + i))
		ev.LoRA = c.lora
		if c.keys != nil {
			ev.ExtraKeys = [][]byte{c.keys}
		}
		e.publish(b)
		var want event.PrefixHash // none, where the keys can't be read
		if c.seed != 0 {
			want = event.PrefixHash(event.LocalHash(tokens(1), c.seed))
		}
		var got event.PrefixHash
		eventually(t, c.name, func() bool {
			var ok bool
			got, ok = sink.name(ev.Blocks[0].Hash)
			return ok
		})
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
	numbered := storing(1, 1)
	numbered.Events[0].Blocks[0].Hash, numbered.Events[0].LoRAID = event.IntHash(99), 7
	e.publish(numbered)
	want := event.PrefixHash(event.LocalHash(tokens(1), event.Hasher{}.Seed("lora-id:7", "")))
	eventually(t, "a name apart from the base model's", func() bool {
		got, ok := sink.name(event.IntHash(99))
		return ok && got == want
	})
	eventually(t, "the unreadable keys in the status", func() bool {
		for _, o := range r.info("a").Oddities {
			if o.Name == "extra_keys_unreadable" {
				return o.Count == 1
			}
		}
		return false
	})
}

// names is a sink that notes what each block is called.
type names struct {
	*recorder
	of map[event.BlockHash]event.PrefixHash
}

func newNames() *names { return &names{newRecorder(), make(map[event.BlockHash]event.PrefixHash)} }

func (n *names) Apply(ctx context.Context, m *event.Message) (event.Digest, error) {
	n.mu.Lock()
	for i := range m.Batches {
		for _, ev := range m.Batches[i].Events {
			for _, b := range ev.Blocks {
				n.of[b.Hash] = b.Prefix
			}
		}
	}
	n.mu.Unlock()
	return n.recorder.Apply(ctx, m)
}

func (n *names) name(h event.BlockHash) (event.PrefixHash, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p, ok := n.of[h]
	return p, ok
}
