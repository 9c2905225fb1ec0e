package archive_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/indexer/history/archive"
)

// everything has a column of each kind.
var everything = &archive.Table{Name: "everything", Needed: []string{"hash"}, Columns: []archive.Column{
	{Name: "hash", Kind: archive.Hash, Bits: 64},
	{Name: "u8", Kind: archive.Unsigned, Bits: 8},
	{Name: "u32", Kind: archive.Unsigned, Bits: 32},
	{Name: "u64", Kind: archive.Unsigned, Bits: 64},
	{Name: "i8", Kind: archive.Signed, Bits: 8},
	{Name: "i32", Kind: archive.Signed, Bits: 32},
	{Name: "i64", Kind: archive.Signed, Bits: 64},
	{Name: "text", Kind: archive.Text},
	{Name: "micros", Kind: archive.Micros, Bits: 64},
	{Name: "seconds", Kind: archive.Seconds, Bits: 32},
	{Name: "day", Kind: archive.Day, Bits: 16},
}}

var other = &archive.Table{Name: "other", Columns: []archive.Column{{Name: "n", Kind: archive.Unsigned, Bits: 32}}}

var known = archive.Tables{everything, other}

var head = archive.Head{Since: time.Unix(1_796_000_000, 0).UTC(), Until: time.Unix(1_796_003_600, 0).UTC()}

func signed(n int64) uint64 { return uint64(n) }

// rows are such as have bits to lose.
func rows() (all [][]archive.Cell) {
	n := func(values ...uint64) (cells []archive.Cell) {
		for _, v := range values {
			cells = append(cells, archive.Cell{N: v})
		}
		return cells
	}
	for i, text := range []string{"", "plain", "two\nlines \"quoted\" \\ \x00 é \u2028 <&>", "no UTF-8: \xff\xfe", strings.Repeat("long ", 20_000), `{"hex":"00"}`} {
		for _, row := range [][]archive.Cell{
			n(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
			n(math.MaxUint64, math.MaxUint8, math.MaxUint32, math.MaxUint64, math.MaxInt8, math.MaxInt32, math.MaxInt64, 0,
				signed(time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC).UnixMicro()), math.MaxUint32, math.MaxUint16),
			n(1<<53+1, 1, 1, 1<<63, signed(math.MinInt8), signed(math.MinInt32), signed(math.MinInt64), 0, signed(-1), 1, 1),
			n(uint64(i)<<60+7, 2, 3, 4, signed(-5), signed(-6), signed(-7), 0, 1_796_000_000_123_456, 1_796_000_001, 20_787),
		} {
			row[7] = archive.Cell{S: text}
			all = append(all, row)
		}
	}
	return all
}

type reader interface {
	Next() (archive.Row, error)
	Head() archive.Head
}

func readAll(t *testing.T, r reader) (all [][]archive.Cell) {
	t.Helper()
	for {
		row, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if row.Table != everything {
			t.Fatalf("a row of %s", row.Table.Name)
		}
		all = append(all, slices.Clone(row.Cells))
	}
}

func lines(t testing.TB, all [][]archive.Cell) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := archive.NewLineWriter(&out, head)
	for i := 0; i < len(all) && err == nil; i++ {
		err = w.Write(archive.Row{Table: everything, Cells: all[i]})
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func parquetFile(t testing.TB, all [][]archive.Cell) []byte {
	t.Helper()
	var out bytes.Buffer
	w := archive.NewParquetWriter(&out, everything, head)
	for _, cells := range all {
		if err := w.Write(archive.Row{Table: everything, Cells: cells}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func openParquet(data []byte) (*archive.ParquetReader, error) {
	return archive.NewParquetReader(bytes.NewReader(data), int64(len(data)), known)
}

func TestLinesAreReadAgain(t *testing.T) {
	data := lines(t, rows())
	r, err := archive.NewLineReader(bytes.NewReader(data), known)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(rows(), readAll(t, r)); diff != "" {
		t.Error(diff)
	}
	if r.Head() != head {
		t.Errorf("window %v", r.Head())
	}
	if !archive.IsHead(data[:bytes.IndexByte(data, '\n')]) {
		t.Error("the first line is not known for what it is")
	}
}

func TestParquetIsReadAgain(t *testing.T) {
	for _, times := range []int{0, 1, 400} { // more than a page of every column
		all := slices.Repeat(rows(), times)
		r, err := openParquet(parquetFile(t, all))
		if err != nil {
			t.Fatal(err)
		}
		got := readAll(t, r)
		if len(all) != len(got) || times > 0 && !slices.EqualFunc(all, got, slices.Equal[[]archive.Cell]) {
			t.Errorf("%d rows: %s", len(got), cmp.Diff(all[:min(len(all), 24)], got[:min(len(got), 24)]))
		}
		if r.Head() != head {
			t.Errorf("window %v", r.Head())
		}
		r.Close()
	}
}

// What a line must be, and what is said where it is not.
func TestBadLines(t *testing.T) {
	begin := `{"kvstrata_history":1,"since":"2026-11-29T18:00:00Z","until":"2026-11-29T19:00:00Z"}` + "\n"
	const hash = `"hash":"00000000000000ff"`
	for _, tt := range []struct{ text, want string }{
		{"", "EOF"},
		{"{}\n", "not that of an export"},
		{`{"kvstrata_history":2,"since":"2026-11-29T18:00:00Z","until":"2026-11-29T19:00:00Z"}`, "reads 1"},
		{`{"kvstrata_history":1,"since":"yesterday","until":"2026-11-29T19:00:00Z"}`, "window"},
		{begin, "cut off"},
		{begin + `{"table":"everything",` + hash + `}`, "cut off"},
		{begin + `{"table":"everything",` + hash, "line 2: not a JSON object"},
		{begin + `[1]`, "line 2: not a JSON object"},
		{begin + `{"table":"users"}`, `line 2: no table "users"`},
		{begin + `{"hash":"00"}`, "line 2: no table is named"},
		{begin + `{"table":"everything"}`, "line 2: column hash is missing"},
		{begin + "\n\n" + `{"table":"everything",` + hash + `,"more":1}`, `line 4: table everything has no column "more"`},
		{begin + `{"table":"everything","hash":"ff"}`, "16 hexadecimal digits"},
		{begin + `{"table":"everything","hash":255}`, "want a text"},
		{begin + `{"table":"everything","hash":"000000000000000g"}`, "16 hexadecimal digits"},
		{begin + `{"table":"everything",` + hash + `,"u8":256}`, "column u8: "},
		{begin + `{"table":"everything",` + hash + `,"u8":-1}`, "column u8: "},
		{begin + `{"table":"everything",` + hash + `,"u8":1.5}`, "column u8: "},
		{begin + `{"table":"everything",` + hash + `,"u8":"1"}`, "column u8: "},
		{begin + `{"table":"everything",` + hash + `,"u64":1}`, "column u64: 1: want a text"},
		{begin + `{"table":"everything",` + hash + `,"i8":-129}`, "column i8: "},
		{begin + `{"table":"everything",` + hash + `,"text":1}`, "column text: "},
		{begin + `{"table":"everything",` + hash + `,"text":{"hex":"0"}}`, "column text: "},
		{begin + `{"table":"everything",` + hash + `,"text":null}`, "column text: "},
		{begin + `{"table":"everything",` + hash + `,"micros":"2026-11-29T18:00:00Z"}`, "column micros: "},
		{begin + `{"table":"everything",` + hash + `,"seconds":"1969-11-29T18:00:00Z"}`, "column seconds: "},
		{begin + `{"table":"everything",` + hash + `,"seconds":"2107-11-29T18:00:00Z"}`, "column seconds: "},
		{begin + `{"table":"everything",` + hash + `,"day":"2026-13-29"}`, "column day: "},
		{begin + `{"kvstrata_end":{"everything":1}}`, "lines are missing"},
		{begin + `{"kvstrata_end":{}}` + "\n{}", "followed by something"},
	} {
		r, err := archive.NewLineReader(strings.NewReader(tt.text), known)
		for err == nil {
			_, err = r.Next()
		}
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
	}
}

// However a row is spelled, it is the same.
func TestSpellings(t *testing.T) {
	const begin, end = `{"kvstrata_history":1,"since":"2026-11-29T18:00:00Z","until":"2026-11-29T19:00:00Z"}` + "\n", "\n" + `{"kvstrata_end":{"everything":1}}`
	want := make([]archive.Cell, len(everything.Columns))
	want[0].N, want[2].N, want[3].N, want[5].N, want[7].S = 255, 7, 1<<63, signed(-7), "aé"
	for _, line := range []string{
		`{"table":"everything","hash":"00000000000000ff","u32":7,"u64":"9223372036854775808","i32":-7,"text":"aé"}`,
		`{"table":"everything","i32":-7,"text":"aé","u64":"9223372036854775808","u32":7,"hash":"00000000000000ff"}`,
		`{ "hash": "00000000000000FF", "table": "everything", "text": "a\u00e9", "u32": 7, "u64": "9223372036854775808", "i32": -7 }`,
		`{"table":"everything","hash":"00000000000000ff","u32":7,"u64":"9223372036854775808","i32":-7,"text":{"hex":"61c3a9"}}`,
	} {
		r, err := archive.NewLineReader(strings.NewReader(begin+line+end), known)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([][]archive.Cell{want}, readAll(t, r)); diff != "" {
			t.Errorf("%s: %s", line, diff)
		}
	}
	for _, line := range []string{
		`{"table":"everything","hash":"00000000000000ff","u32":07}`, `{"table":"everything","hash":"00000000000000ff","u32":+7}`,
		`{"table":"everything","hash":"00000000000000ff","u32":7}}`, `{"table":"everything","hash":"00000000000000ff","u32":7,}`,
		`{"table":"everything","hash":"00000000000000ff" "u32":7}`, `{"table":"everything","u32":-,"hash":"00000000000000ff"}`,
		"{\"table\":\"everything\",\"hash\":\"00000000000000ff\",\"text\":\"\t\"}", `{"table":"everything"`,
	} {
		r, err := archive.NewLineReader(strings.NewReader(begin+line+end), known)
		if err != nil {
			t.Fatal(err)
		}
		if row, err := r.Next(); !errors.As(err, new(*archive.BadRow)) {
			t.Errorf("%s: %v, %v", line, row, err)
		}
	}
}

// Behind a bad line the reader goes on.
func TestBadLinesCanBePassedOver(t *testing.T) {
	data := bytes.SplitAfter(lines(t, rows()[:3]), []byte("\n"))
	text := slices.Concat(data[0], data[1], []byte("{broken\n"), data[2], bytes.Repeat([]byte("x"), archive.MaxLine+1), []byte("\n"), data[3], data[4])
	r, err := archive.NewLineReader(bytes.NewReader(text), known)
	if err != nil {
		t.Fatal(err)
	}
	var story []string
	for {
		_, err := r.Next()
		bad := (*archive.BadRow)(nil)
		switch {
		case errors.Is(err, io.EOF):
			if diff := cmp.Diff([]string{"row", "bad 3", "row", "bad 5", "row"}, story); diff != "" {
				t.Error(diff)
			}
			return
		case errors.As(err, &bad):
			story = append(story, fmt.Sprint("bad ", bad.Line))
		case err != nil:
			t.Fatal(err)
		default:
			story = append(story, "row")
		}
	}
}

// A Parquet file that was cut, or changed anywhere, gives an error or other rows of the same kinds, and nothing else.
func TestBadParquet(t *testing.T) {
	data := parquetFile(t, rows()[:4])
	for n := range len(data) {
		if r, err := openParquet(data[:n]); err == nil {
			t.Errorf("%d of %d bytes are read", n, len(data))
			r.Close()
		}
	}
	for i := range len(data) {
		for _, flip := range []byte{1, 0x80, 0xff} {
			changed := bytes.Clone(data)
			changed[i] ^= flip
			drain(changed)
		}
	}
	var out bytes.Buffer
	w := archive.NewParquetWriter(&out, &archive.Table{Name: "everything", Columns: []archive.Column{{Name: "hash", Kind: archive.Text}}}, head)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := openParquet(out.Bytes()); err == nil || !strings.Contains(err.Error(), "column hash is of type") {
		t.Errorf("another type: %v", err)
	}
}

// What a file says of its sizes is not believed.
func TestParquetBombs(t *testing.T) {
	withEnd := func(end []byte) []byte {
		b := append([]byte("PAR1"), end...)
		return append(binary.LittleEndian.AppendUint32(b, uint32(len(end))), "PAR1"...)
	}
	large := slices.Clone(rows()[0])
	large[7].S = strings.Repeat("\x00", 64<<20)
	for name, data := range map[string][]byte{
		"a list of 2^31 columns":      withEnd([]byte{0x15, 0x02, 0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x07, 0x00}),
		"3 million columns of a byte": withEnd(slices.Concat(binary.AppendUvarint([]byte{0x15, 0x02, 0x19, 0xfc}, 3_000_000), make([]byte, 3_000_001))),
		"lists within lists":          withEnd(append(bytes.Repeat([]byte{0x19, 0x19}, 1000), 0)),
		"an end of 4 GiB":             append([]byte("PAR1\x00\x00\x00\x00\xff\xff\xff\xff"), "PAR1"...),
		"a text of 64 MiB in a page":  parquetFile(t, [][]archive.Cell{large}),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		r, err := openParquet(data)
		if err == nil {
			_, err = r.Next()
			r.Close()
		}
		runtime.ReadMemStats(&after)
		if err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
		if got := after.TotalAlloc - before.TotalAlloc; got > 32<<20 {
			t.Errorf("%s: %d bytes allocated", name, got)
		}
	}
}

// drain reads what there is.
func drain(data []byte) {
	r, err := openParquet(data)
	if err != nil {
		return
	}
	defer r.Close()
	for err == nil {
		_, err = r.Next()
	}
}

func FuzzParquet(f *testing.F) {
	f.Add(parquetFile(f, rows()[:4]))
	f.Fuzz(func(_ *testing.T, data []byte) { drain(data) })
}

func FuzzLines(f *testing.F) {
	f.Add(lines(f, rows()[:12]))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := archive.NewLineReader(bytes.NewReader(data), known)
		if err != nil {
			return
		}
		var all [][]archive.Cell
		for {
			row, err := r.Next()
			if err != nil {
				if !errors.As(err, new(*archive.BadRow)) {
					break
				}
				continue
			}
			if row.Table == everything {
				all = append(all, slices.Clone(row.Cells))
			}
		}
		// What was read can be written, and is read again.
		again, err := archive.NewLineReader(bytes.NewReader(lines(t, all)), known)
		if err != nil {
			t.Fatal(err)
		}
		if got := readAll(t, again); !slices.EqualFunc(all, got, slices.Equal[[]archive.Cell]) {
			t.Error(cmp.Diff(all, got))
		}
	})
}
