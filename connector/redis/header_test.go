package redis_test

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/connector"
	"kvstrata/connector/redis"
	"kvstrata/connector/store"
	"kvstrata/event"
)

func sampleHeader() redis.Header {
	return redis.Header{
		Group: store.Group{
			Blocks:    []connector.Name{{Hash: event.IntHash(0x0102030405060708), Prefix: 0x1112131415161718}, {Hash: event.BytesHash("sixteen bytes..!"), Prefix: 3}},
			HasParent: true, Parent: connector.Name{Hash: event.IntHash(9), Prefix: 0x2a}, LoRA: "poet", Rank: 2,
		},
		Compatibility: compatibility, BlockTokens: 16, Payload: 0x1000, Sum: 0xfeedbeef, HasSum: true,
	}
}

// TestHeaderBytes pins format version 1.
func TestHeaderBytes(t *testing.T) {
	h := sampleHeader()
	b, err := redis.AppendHeader(nil, &h)
	if err != nil {
		t.Fatal(err)
	}
	const want = "6b767367" + "0100" + "0300" + "96000000" + "02000000" + "0010000000000000" + "efbeedfe00000000" +
		"abcd010203040506070000000000000000000000000000000000000000000000" + "10000000" + "02000000" + "2a00000000000000" + "0800" + "0400" + "00000000" +
		"SUM.............." + "0000000000000009" + "706f6574" + "1817161514131211" + "08" + "0102030405060708" + "0300000000000000" + "10" +
		"7369787465656e2062797465732e2e21"
	got := hex.EncodeToString(b)
	got = got[:176] + "SUM.............." + got[192:]
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	back, more, err := redis.ParseHeader(b, int64(len(b))+0x1000)
	if err != nil || more != 0 {
		t.Fatal(more, err)
	}
	if diff := cmp.Diff(h, back, cmp.Comparer(event.BlockHash.Equal)); diff != "" {
		t.Error(diff)
	}
	for n := range len(b) {
		if _, more, err := redis.ParseHeader(b[:n], int64(len(b))+0x1000); err != nil || more <= n {
			t.Errorf("the first %d bytes: want more than %d, %v", n, more, err)
		}
	}
	for i := range len(b) {
		wrong := bytes.Clone(b)
		wrong[i] ^= 0x10
		if _, more, err := redis.ParseHeader(wrong, int64(len(b))+0x1000); err == nil && more == 0 {
			t.Errorf("a changed byte %d goes unnoticed", i)
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	h := sampleHeader()
	b, err := redis.AppendHeader(nil, &h)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b, int64(len(b))+0x1000)
	f.Add(b[:96], int64(96))
	f.Add([]byte("kvsg\x01\x00"), int64(1000))
	f.Fuzz(func(t *testing.T, b []byte, value int64) {
		h, more, err := redis.ParseHeader(b, value)
		if more > 64<<10 {
			t.Errorf("it wants %d bytes", more)
		}
		if err != nil || more > 0 {
			return
		}
		again, err := redis.AppendHeader(nil, &h)
		if err != nil || len(h.Group.Blocks) == 0 {
			t.Fatalf("%+v cannot be written: %v", h, err)
		}
		if int64(len(again))+int64(h.Payload) != value {
			t.Errorf("a header of %d and a payload of %d bytes in a value of %d", len(again), h.Payload, value)
		}
	})
}
