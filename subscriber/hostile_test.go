package subscriber_test

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"kvstrata/event"
	"kvstrata/publisher"
	"kvstrata/subscriber"
)

// decode decodes one payload with a fresh decoder.
func decode(t *testing.T, cfg subscriber.DecoderConfig, payload []byte) (event.Batch, *subscriber.Decoder, error) {
	t.Helper()
	d := subscriber.NewDecoder(cfg)
	var b event.Batch
	err := d.Decode(payload, &b)
	return b, d, err
}

// Maps within maps where SGLang has one must not take the stack.
func TestMapsWithinMapsEnd(t *testing.T) {
	payload := []byte{0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x91, 0x98}
	payload = msgp.AppendString(payload, "BlockStored")
	payload = append(payload, 0x91, 1, 0xc0, 0x90, 16, 0xc0, 0xc0) // hashes, parent, tokens, block size, LoRA id, medium
	for range 1_000_000 {
		payload = append(payload, 0x81)
		payload = msgp.AppendString(payload, "lora_name")
	}
	payload = append(payload, 0xc0, 0)
	if _, _, err := decode(t, subscriber.DecoderConfig{}, payload); err == nil {
		t.Error("it was taken")
	}
}

// No JSON makes the decoder hold much more than its bounds on what an event lists.
func TestJSONMemory(t *testing.T) {
	many := func(element string, n int) string { return strings.TrimSuffix(strings.Repeat(element+",", n), ",") }
	for name, text := range map[string]string{
		"blocks":   `{"event_id":1,"data":{"type":"stored","blocks":[` + many(`{}`, 1<<21) + `]}}`,
		"removed":  `{"event_id":1,"data":{"type":"removed","block_hashes":[` + many(`1`, 1<<22) + `]}}`,
		"router":   `{"event_id":1,"data":{"stored":{"blocks":[` + many(`{}`, 1<<21) + `]}},"dp_rank":0}`,
		"withdrew": `{"event_id":1,"data":{"removed":{"block_hashes":[` + many(`1`, 1<<22) + `]}},"dp_rank":0}`,
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, _, err := decode(t, subscriber.DecoderConfig{BlockSize: 16}, []byte(text))
			runtime.ReadMemStats(&after)
			if took := after.TotalAlloc - before.TotalAlloc; took > 8*uint64(len(text)) {
				t.Errorf("%d bytes took %d", len(text), took)
			}
			if err == nil || !strings.Contains(err.Error(), "longer than an event's") {
				t.Errorf("%.100v", err)
			}
		})
	}
}

// A word of the stream that a status tells is cut, so that no engine can make its statuses too large to be told.
func TestMediaAreCutInContracts(t *testing.T) {
	_, d, err := decode(t, subscriber.DecoderConfig{}, pack([]any{1.5, []any{storedMap(5, map[string]any{"medium": strings.Repeat("x", 900)})}, 0}))
	if media := d.Contract().Media; err != nil || len(media) != 1 || len(media[0]) > 64 {
		t.Errorf("%v, media of %d bytes", err, len(fmt.Sprint(media)))
	}
	if _, _, err := decode(t, subscriber.DecoderConfig{}, pack([]any{1.5, []any{storedMap(5, map[string]any{"medium": strings.Repeat("x", 1<<20)})}, 0})); err == nil {
		t.Error("a medium of a megabyte was taken")
	}
}

// A configured dialect keeps the others out, and whole seconds are not milliseconds.
func TestDialectsAreForced(t *testing.T) {
	trt := []byte(`{"event_id":1,"data":{"type":"removed","block_hashes":[1]}}`)
	router := []byte(`{"event_id":1,"data":"cleared","dp_rank":0}`)
	stored := pack([]any{1.5, []any{storedMap(5, nil)}, 0})
	for _, tt := range []struct {
		dialect subscriber.Dialect
		payload []byte
		ok      bool
	}{
		{subscriber.AnyDialect, trt, true},
		{subscriber.DialectTensorRT, trt, true},
		{subscriber.DialectVLLM, trt, false},
		{subscriber.DialectDynamo, trt, false},
		{subscriber.DialectDynamo, router, true},
		{subscriber.DialectTensorRT, router, false},
		{subscriber.DialectDynamo, stored, false},
		{subscriber.DialectSGLang, stored, true},
	} {
		if _, _, err := decode(t, subscriber.DecoderConfig{Dialect: tt.dialect, BlockSize: 16}, tt.payload); (err == nil) != tt.ok {
			t.Errorf("%v of %.40q: %v", tt.dialect, tt.payload, err)
		}
	}
	seconds := []byte{0x93, 0xcf, 0, 0, 0, 0, 0x6a, 0, 0, 0} // a time that spends eight bytes on seconds
	seconds = append(seconds, stored[10:]...)
	if b, d, err := decode(t, subscriber.DecoderConfig{}, seconds); err != nil || len(b.Events) != 1 || d.Dialect() != subscriber.DialectVLLM {
		t.Errorf("whole seconds: %v, %+v, %v", err, b.Events, d.Dialect())
	}
}

// What an event should name and does not is no block 0.
func TestHashesMustBeTold(t *testing.T) {
	for _, text := range []string{
		`{"event_id":1,"data":{"type":"stored","blocks":[{"tokens":[],"cache_level":0}]}}`,
		`{"event_id":1,"data":{"type":"updated","cache_level":{"old_value":0,"new_value":1}}}`,
		`{"event_id":1,"data":{"stored":{"blocks":[{"tokens_hash":5}]}},"dp_rank":0}`,
	} {
		if b, _, err := decode(t, subscriber.DecoderConfig{BlockSize: 16}, []byte(text)); err == nil {
			t.Errorf("%s gives %+v", text, b.Events)
		}
	}
}

// A run that begins in the middle of a prompt that nobody told is no root.
func TestDynamoRunsFromTheMiddle(t *testing.T) {
	b, d, err := decode(t, subscriber.DecoderConfig{BlockSize: 16},
		[]byte(`{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":64,"blocks":[{"block_hash":1,"tokens_hash":5}]}},"dp_rank":0}`))
	if err != nil || b.Events[0].Locals != nil || len(d.Oddities()) != 1 {
		t.Errorf("%v, %+v, %+v", err, b.Events, d.Oddities())
	}
}

// What stands beside tokens is told by its place.
func TestTensorRTExtraIDsKeepTheirPlaces(t *testing.T) {
	keys := func(a, b int) []byte {
		batch, _, err := decode(t, subscriber.DecoderConfig{}, fmt.Appendf(nil, `{"event_id":1,"data":{"type":"stored","blocks":[{"block_hash":1,"cache_level":0,`+
			`"tokens":[{"token_id":5,"token_extra_id":%d},{"token_id":5,"token_extra_id":%d}]}]}}`, a, b))
		if err != nil {
			t.Fatal(err)
		}
		return batch.Events[0].ExtraKeys[0]
	}
	if bytes.Equal(keys(1, 0), keys(0, 1)) {
		t.Error("two blocks have the same keys")
	}
	if keys(0, 0) != nil {
		t.Error("nothing is something")
	}
}

// Pools of several windows add up, the smaller window slides, and another life begins without them.
func TestTensorRTWindows(t *testing.T) {
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	var b event.Batch
	for _, text := range []string{
		`{"event_id":0,"data":{"type":"created","num_blocks_per_cache_level":[100,0]},"window_size":8192}`,
		`{"event_id":1,"data":{"type":"created","num_blocks_per_cache_level":[3,0]},"window_size":512}`,
		`{"event_id":2,"data":{"type":"stored","blocks":[{"block_hash":1,"tokens":[{"token_id":1}],"cache_level":0}]},"window_size":512}`,
	} {
		if err := d.Decode([]byte(text), &b); err != nil {
			t.Fatal(err)
		}
	}
	if d.Pool() != 103 || b.Events[0].Spec != event.SpecSlidingWindow || b.Events[0].Window != 512 {
		t.Errorf("pool %d, %+v", d.Pool(), b.Events[0])
	}
	if d.Forget(); d.Pool() != 0 {
		t.Errorf("pool %d of another life", d.Pool())
	}
}

// What other stores and half-full blocks tell in the same stream leaves the device's blocks findable.
func TestOtherBlockSizesHideNothing(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	chunk := func(medium event.Tier) *event.Batch {
		b := storing(1, 1)
		ev := &b.Events[0]
		ev.Tier, ev.BlockSize, ev.Blocks[0].Hash = medium, 64, event.IntHash(900)
		for n := 2; n <= 4; n++ {
			ev.Tokens = append(ev.Tokens, tokens(n)...)
		}
		return b
	}
	e.publish(storing(1, 4), chunk("cpu"), chunk(event.CPU))
	r.await("a", 2, event.StateLive)
	if n := r.matched("a"); n != 4 {
		t.Errorf("%d blocks match, want 4", n)
	}

	buffer := trtBlocks(1, 4)
	d := subscriber.NewDecoder(subscriber.DecoderConfig{})
	var b event.Batch
	for _, data := range []string{buffer, `{"type":"stored","parent_hash":4,"blocks":[{"block_hash":5,"tokens":[{"token_id":1},{"token_id":2}],"cache_level":0}]}`} {
		if err := d.Decode(fmt.Appendf(nil, `{"event_id":0,"data":%s}`, data), &b); err != nil {
			t.Fatal(err)
		}
	}
	if ev := b.Events[0]; ev.BlockSize != 0 || ev.Tokens != nil || len(ev.Blocks) != 1 {
		t.Errorf("a block that is not full: %+v", ev)
	}
}

// Extra keys that are not one a block leave the run without names.
func TestExtraKeysThatFitNoBlocks(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	odd := storing(1, 2)
	odd.Events[0].ExtraKeys = [][]byte{keys("salt")}
	payload := publisher.AppendVLLM(nil, odd, publisher.MapForm)
	e.raw(true, payload)
	r.await("a", 0, event.StateLive)
	if n := r.matched("a"); n > 0 {
		t.Errorf("%d blocks match", n)
	}
}

// As long as nothing says whether an engine tells extra keys, an offloaded run without them is not named.
func TestOffloadedBlocksBeforeAnyOther(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.subscribe(e.config("a"))
	offloaded := storing(1, 1)
	offloaded.Events[0].Tier = event.CPU
	e.publish(offloaded)
	r.await("a", 0, event.StateLive)
	if n := r.matched("a"); n > 0 {
		t.Errorf("%d blocks match", n)
	}
}
