package lmcache_test

import (
	"bytes"
	"fmt"
	"testing"

	"kvstrata/connector/lmcache"
)

// small is a value of 2 tokens in one layer of 4 elements, and what is said of it.
const small = 2 * 1 * 2 * 4 * 2

var smallContent = lmcache.Content{Format: lmcache.KV2LTD, DType: lmcache.BFloat16, Shape: [4]int32{2, 1, 2, 4}}

func smallValue() []byte {
	b := make([]byte, small)
	for i := range b {
		b[i] = byte('a' + i)
	}
	return b
}

func pieces() [][]byte {
	b := make([]byte, small)
	return [][]byte{b[:1], b[1:1], b[1:20], b[20:]}
}

// FuzzReceive reads what a server of lm:// may say to a GET. What comes without an error is what was said.
func FuzzReceive(f *testing.F) {
	f.Add(append(lmcache.V1.AppendReply(nil, &lmcache.Reply{Code: lmcache.Success, Length: small, Content: smallContent}), smallValue()...))
	f.Add(append(lmcache.V0.AppendReply(nil, &lmcache.Reply{Code: lmcache.Success, Length: small}), smallValue()...))
	f.Add(lmcache.V1.AppendReply(nil, &lmcache.Reply{Code: lmcache.Fail}))
	f.Fuzz(func(t *testing.T, said []byte) {
		for _, p := range []lmcache.Protocol{lmcache.V0, lmcache.V1} {
			into := pieces()
			left, refused, broken := lmcache.ReceiveLM(p, said, smallContent, into)
			if refused != nil || broken != nil {
				continue
			}
			head := p.ReplyBytes()
			if got := bytes.Join(into, nil); left != len(said)-head-small || !bytes.Equal(got, said[head:head+small]) {
				t.Fatalf("%v: %q reads as %q, %d are left", p, said, got, left)
			}
		}
	})
}

// FuzzReceiveRedis reads what Redis may say to the two GETs of a chunk.
func FuzzReceiveRedis(f *testing.F) {
	meta, err := (&lmcache.Metadata{Length: small, Format: lmcache.KV2LTD, Groups: []lmcache.MetadataGroup{{DType: smallContent.DType, Shape: smallContent.Shape}}}).Append(nil)
	if err != nil {
		f.Fatal(err)
	}
	good := fmt.Appendf(nil, "$%d\r\n%s\r\n$%d\r\n%s\r\n", len(meta), meta, small, smallValue())
	f.Add(good)
	f.Add([]byte("$-1\r\n$-1\r\n"))
	f.Add([]byte("-ERR no\r\n-ERR no\r\n"))
	f.Add(fmt.Appendf(nil, "$%d\r\n%s\r\n$-1\r\n", len(meta), meta))
	f.Fuzz(func(t *testing.T, said []byte) {
		into := pieces()
		left, refused, broken := lmcache.ReceiveRedis(said, smallContent, into)
		if refused != nil || broken != nil {
			return
		}
		if got := bytes.Join(into, nil); !bytes.HasSuffix(said[:len(said)-left], append(got, '\r', '\n')) {
			t.Fatalf("%q reads as %q, %d are left", said, got, left)
		}
	})
	if left, refused, broken := lmcache.ReceiveRedis(good, smallContent, pieces()); left != 0 || refused != nil || broken != nil {
		f.Fatal(left, refused, broken)
	}
}
