package sim_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"kvstrata/sim"

	"github.com/google/go-cmp/cmp"
)

var rewrite = flag.Bool("rewrite", false, "write testdata/small.jsonl anew")

// small returns the requests of testdata/small.jsonl.
func small() []sim.TraceRequest { return slices.Collect(sim.SyntheticTrace(1, 150)) }

// readTrace reads to the end or to the first error.
func readTrace(r io.Reader) (all []sim.TraceRequest, err error) {
	reader := sim.NewTraceReader(r)
	for {
		request, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, request)
	}
}

func TestSmallTraceIsTheSyntheticOne(t *testing.T) {
	path := filepath.Join("testdata", "small.jsonl")
	var want bytes.Buffer
	w := sim.NewTraceWriter(&want)
	for _, r := range small() {
		if err := w.Write(&r); err != nil {
			t.Fatal(err)
		}
	}
	if *rewrite {
		if err := os.WriteFile(path, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.String(), string(got)); diff != "" {
		t.Errorf("%s differs from SyntheticTrace(1, 150); to write it anew: go test ./sim -run SmallTrace -rewrite "+
			"(-want +got):\n%s", path, diff)
	}
}

func TestTraceRoundTrip(t *testing.T) {
	want := small()
	var text bytes.Buffer
	w := sim.NewTraceWriter(&text)
	for _, r := range want {
		if err := w.Write(&r); err != nil {
			t.Fatal(err)
		}
	}
	got, err := readTrace(iotest.OneByteReader(&text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-written +read):\n%s", diff)
	}
}

func TestTraceReaderTakes(t *testing.T) {
	ids := func(from, n int) []uint64 {
		ids := make([]uint64, n)
		for i := range ids {
			ids[i] = uint64(from + i)
		}
		return ids
	}
	long := strings.ReplaceAll(fmt.Sprint(ids(1_000_000, 20_000)), " ", ",") // beyond the reader's buffer
	tests := []struct {
		name, text string
		want       []sim.TraceRequest
	}{
		{"nothing", "", nil},
		{
			"empty lines, and no newline at the end", "\n  \r\n" + `{"timestamp":5,"input_length":513,"output_length":0,"hash_ids":[7,9]}`,
			[]sim.TraceRequest{{Timestamp: 5, InputLength: 513, HashIDs: []uint64{7, 9}}},
		},
		{
			"keys of other traces, in any order", `{"hash_ids":[1],"type":"text","output_length":3,"input_length":512,"timestamp":0}`,
			[]sim.TraceRequest{{InputLength: 512, OutputLength: 3, HashIDs: []uint64{1}}},
		},
		{
			"a long line", `{"timestamp":0,"input_length":10240000,"output_length":1,"hash_ids":` + long + "}\n",
			[]sim.TraceRequest{{InputLength: 10_240_000, OutputLength: 1, HashIDs: ids(1_000_000, 20_000)}},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := readTrace(strings.NewReader(test.text))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTraceReaderRefuses(t *testing.T) {
	line := func(timestamp, input, output, ids string) string {
		return fmt.Sprintf(`{"timestamp":%s,"input_length":%s,"output_length":%s,"hash_ids":%s}`, timestamp, input, output, ids)
	}
	good := line("0", "1", "1", "[0]") + "\n"
	tests := []struct{ name, line, want string }{
		{"no JSON", `timestamp`, "invalid character"},
		{"half a line", `{"timestamp":0,"input_le`, "unexpected end"},
		{"more than a line", `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0]} {}`, "invalid character '{'"},
		{"another type", `[1,2]`, "cannot unmarshal array"},
		{"null", `null`, "timestamp: is missing"},
		{"no timestamp", `{"input_length":1,"output_length":1,"hash_ids":[0]}`, "timestamp: is missing"},
		{"no input_length", `{"timestamp":0,"output_length":1,"hash_ids":[0]}`, "input_length: is missing"},
		{"no output_length", `{"timestamp":0,"input_length":1,"hash_ids":[0]}`, "output_length: is missing"},
		{"no hash_ids", `{"timestamp":0,"input_length":1,"output_length":1}`, "hash_ids: is missing"},
		{"null id", line("0", "1", "1", "[null]"), "hash_ids: holds null"},
		{"negative time", line("-1", "1", "1", "[0]"), "timestamp -1: want"},
		{"time beyond time", line("9223372036854775807", "1", "1", "[0]"), "timestamp 9223372036854775807: want"},
		{"negative input", line("0", "-512", "1", "[]"), "input_length -512: want 1 to 16777216"},
		{"no input", line("0", "0", "1", "[]"), "input_length 0: want 1 to 16777216"},
		{"endless input", line("0", "9000000000", "1", "[0]"), "input_length 9000000000: want"},
		{"negative output", line("0", "1", "-1", "[0]"), "output_length -1: want 0 to"},
		{"negative id", line("0", "1", "1", "[-4]"), "cannot unmarshal number -4"},
		{"too few ids", line("0", "513", "1", "[1]"), "hash_ids: want 2 for input_length 513, have 1"},
		{"too many ids", line("0", "512", "1", "[1,2]"), "hash_ids: want 1 for input_length 512, have 2"},
		{"fractions", line("0", "1.5", "1", "[1]"), "cannot unmarshal number 1.5"},
		{"a line without end", strings.Repeat("x", 1<<20+1), "longer than 1048576 bytes"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := readTrace(strings.NewReader(good + "\n" + test.line + "\n" + good))
			var traceErr *sim.TraceError
			if !errors.As(err, &traceErr) {
				t.Fatalf("error %v, want a TraceError", err)
			}
			if traceErr.Line != 3 || !strings.Contains(traceErr.Reason, test.want) {
				t.Errorf("error %q, want line 3 and %q", err, test.want)
			}
			if len(got) != 1 {
				t.Errorf("%d requests before the error, want 1", len(got))
			}
		})
	}
	if _, err := readTrace(iotest.ErrReader(errPublish)); !errors.Is(err, errPublish) {
		t.Errorf("a reader that fails: %v", err)
	}
	var traceErr *sim.TraceError
	if err := sim.NewTraceWriter(io.Discard).Write(&sim.TraceRequest{InputLength: 600}); !errors.As(err, &traceErr) {
		t.Errorf("write of an impossible request: %v", err)
	}
}

func TestTracePrompt(t *testing.T) {
	request := sim.TraceRequest{InputLength: 512 + 512 + 100, HashIDs: []uint64{3, 5, 3}}
	got := request.Prompt()
	if len(got) != request.InputLength {
		t.Fatalf("%d tokens, want %d", len(got), request.InputLength)
	}
	if diff := cmp.Diff(got[:100], got[1024:]); diff != "" {
		t.Errorf("one id gives other tokens in another place (-first +third):\n%s", diff)
	}
	distinct := make(map[uint32]bool)
	for _, token := range got[:1024] {
		if token >= 1<<17 {
			t.Fatalf("token %d lies beyond the vocabulary", token)
		}
		distinct[token] = true
	}
	if len(distinct) < 1000 {
		t.Errorf("%d distinct tokens of 1024", len(distinct))
	}
}

func TestTraceArrivals(t *testing.T) {
	const text = `{"timestamp":0,"input_length":3,"output_length":2,"hash_ids":[4]}` + "\n\n" +
		`{"timestamp":1500,"input_length":600,"output_length":1,"hash_ids":[4,5]}` + "\nbad\n"
	var got []sim.Arrival
	var last error
	for a, err := range sim.NewTraceReader(strings.NewReader(text)).Arrivals() {
		if last = err; err == nil {
			got = append(got, a)
		}
	}
	var traceErr *sim.TraceError
	if !errors.As(last, &traceErr) || traceErr.Line != 4 {
		t.Errorf("the last error is %v, want one of line 4", last)
	}
	first := sim.TraceRequest{InputLength: 3, HashIDs: []uint64{4}}
	second := sim.TraceRequest{InputLength: 600, HashIDs: []uint64{4, 5}}
	want := []sim.Arrival{
		{Request: sim.Request{ID: "line-1", Prompt: first.Prompt(), Output: 2}, HashIDs: []uint64{4}},
		{At: 1500 * time.Millisecond, Request: sim.Request{ID: "line-3", Prompt: second.Prompt(), Output: 1}, HashIDs: []uint64{4, 5}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("arrivals (-want +got):\n%s", diff)
	}
}

func FuzzTraceReader(f *testing.F) {
	f.Add(`{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1,2]}` + "\n")
	f.Add("\n\n{}\n")
	f.Add(`{"timestamp":1e3,"input_length":1,"output_length":null,"hash_ids":null}`)
	f.Fuzz(func(t *testing.T, text string) {
		requests, err := readTrace(strings.NewReader(text))
		var traceErr *sim.TraceError
		if err != nil && !errors.As(err, &traceErr) {
			t.Fatalf("error %v is no TraceError", err)
		}
		var out bytes.Buffer
		w := sim.NewTraceWriter(&out)
		for i := range requests {
			if err := w.Write(&requests[i]); err != nil {
				t.Fatalf("a request that was read cannot be written: %v", err)
			}
		}
		again, err := readTrace(&out)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(requests, again); diff != "" {
			t.Fatalf("requests (-read +read again):\n%s", diff)
		}
	})
}
