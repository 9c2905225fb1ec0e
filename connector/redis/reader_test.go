package redis

import (
	"bytes"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"kvstrata/connector"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// trickle gives its bytes in small portions.
type trickle struct {
	src io.Reader
	n   int
}

func (r *trickle) Read(b []byte) (int, error) { return r.src.Read(b[:min(len(b), r.n)]) }

// sampleValue is a value of 10 bytes and its operation.
func sampleValue() (value []byte, payload string) {
	payload = "0123456789"
	h := Header{Group: store.Group{Blocks: []connector.Name{{Hash: event.IntHash(1), Prefix: 2}}}, Payload: 10, BlockTokens: 16}
	value, _ = AppendHeader(nil, &h)
	return append(value, payload...), payload
}

// FuzzReply reads whatever a server may send as the replies to a GET, a SET, an EXISTS and a GET. It never panics, and never
// takes wrong bytes for right ones.
func FuzzReply(f *testing.F) {
	value, payload := sampleValue()
	bulk := "$" + strconv.Itoa(len(value)) + "\r\n" + string(value) + "\r\n"
	f.Add([]byte(bulk+"+OK\r\n:1\r\n"+bulk), 3)
	f.Add([]byte("$-1\r\n-OOM no\r\n:0\r\n$3\r\nabc\r\n"), 1)
	f.Add([]byte("$99999999999\r\n"), 100)
	f.Add([]byte("$-9\r\n*3\r\n\r\n"), 5)
	f.Fuzz(func(t *testing.T, input []byte, portion int) {
		r := newReader(&trickle{bytes.NewReader(input), min(max(portion, 1), 1<<16)})
		pieces := [][]byte{make([]byte, 3), nil, make([]byte, 7)}
		item := store.Item{Key: "kv:0:0:0000000000000001", Pieces: pieces, Bytes: 10}
		for _, kind := range []opKind{opGet, opSet, opExists, opGet} {
			line, err := r.line()
			if err != nil {
				return
			}
			o := &op{kind: kind, key: item.Key, bytes: 10, item: &item}
			fail, err := r.reply(o, line, new([32]byte), true)
			if err != nil {
				return
			}
			if kind == opGet && fail == nil && !bytes.Contains(input, []byte(pieces[0])) {
				t.Errorf("%q was not sent", pieces)
			}
		}
		_ = payload
	})
}

func FuzzPush(f *testing.F) {
	f.Add([]byte(">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nk\r\n>2\r\n+invalidate\r\n_\r\n"))
	f.Add([]byte("%1\r\n$1\r\na\r\n*1\r\n:1\r\n-ERR\r\n"))
	f.Add([]byte("*64\r\n*64\r\n*64\r\n*64\r\n*64\r\n"))
	f.Fuzz(func(t *testing.T, input []byte) {
		p := newPushReader(bytes.NewReader(input))
		var parts [][]byte
		var err error
		for err == nil {
			if parts, err = p.next(parts); len(parts) > 4*maxPushItems {
				t.Fatalf("%d parts", len(parts))
			}
		}
	})
}

// TestReaderStaysInStep sends values whose operation was left, or is of another size, in between such that are wanted, by a
// socket and by a plain reader, in portions of any size.
func TestReaderStaysInStep(t *testing.T) {
	value, payload := sampleValue()
	bulk := "$" + strconv.Itoa(len(value)) + "\r\n" + string(value) + "\r\n"
	var stream bytes.Buffer
	for range 50 {
		stream.WriteString(bulk)
	}
	for _, portion := range []int{1, 2, 7, 117, 118, 4096, 1 << 20} {
		for _, socket := range []bool{false, true} {
			src := io.Reader(&trickle{bytes.NewReader(stream.Bytes()), portion})
			var writing sync.WaitGroup
			if socket {
				ours, theirs := tcpPair(t)
				writing.Go(func() {
					for rest := stream.Bytes(); len(rest) > 0; {
						n := min(portion, len(rest))
						if _, err := theirs.Write(rest[:n]); err != nil {
							t.Error(err)
							return
						}
						rest = rest[n:]
					}
				})
				src = ours
			}
			r := newReader(src)
			for i := range 50 {
				item := store.Item{Key: "kv:0:0:0000000000000001", Pieces: [][]byte{make([]byte, 4), make([]byte, 6)}, Bytes: 10}
				o := &op{kind: opGet, key: item.Key, bytes: 10, item: &item, left: i%3 == 1}
				if i%3 == 2 {
					o.bytes = 11
				}
				line, err := r.line()
				if err != nil {
					t.Fatal(err)
				}
				fail, err := r.reply(o, line, new([32]byte), true)
				if err != nil {
					t.Fatalf("portion %d, value %d: %v", portion, i, err)
				}
				got := string(bytes.Join(item.Pieces, nil))
				if (i%3 == 0) != (got == payload && fail == nil) || i%3 == 1 && got != string(make([]byte, 10)) {
					t.Errorf("portion %d, value %d: %q, %v", portion, i, got, fail)
				}
			}
			writing.Wait()
		}
	}
}

func tcpPair(t *testing.T) (ours, theirs net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if ours, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if theirs, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = ours.Close(), theirs.Close() })
	return ours, theirs
}

// TestPiecesThatShareMemory are those of bytes that are thrown away.
func TestPiecesThatShareMemory(t *testing.T) {
	h := Header{Group: store.Group{Blocks: []connector.Name{{Hash: event.IntHash(1), Prefix: 2}}}, Payload: 300_000, BlockTokens: 16, HasSum: true}
	payload := bytes.Repeat([]byte("0123456789"), 30_000)
	h.Sum = xxh3.Hash(payload)
	value, err := AppendHeader(nil, &h)
	if err != nil {
		t.Fatal(err)
	}
	value = append(value, payload...)
	ours, theirs := tcpPair(t)
	var writing sync.WaitGroup
	writing.Go(func() {
		for range 2 {
			if _, err := theirs.Write([]byte("$" + strconv.Itoa(len(value)) + "\r\n" + string(value) + "\r\n")); err != nil {
				t.Error(err)
			}
		}
	})
	r := newReader(ours)
	room := make([]byte, 100_000)
	for _, pieces := range [][][]byte{{room[:100_000], make([]byte, 50_000), room[:100_000], make([]byte, 50_000)}, {make([]byte, 300_000)}} {
		item := store.Item{Key: "kv:0:0:0000000000000001", Pieces: pieces, Bytes: 300_000}
		o := &op{kind: opGet, key: item.Key, bytes: item.Bytes, item: &item}
		line, err := r.line()
		if err != nil {
			t.Fatal(err)
		}
		if fail, err := r.reply(o, line, new([32]byte), true); fail != nil || err != nil {
			t.Fatal(fail, err)
		}
	}
	writing.Wait()
}
