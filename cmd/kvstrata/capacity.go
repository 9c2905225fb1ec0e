package main

import (
	"cmp"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"kvstrata/event"
	"kvstrata/indexer/history/capacity"
	"kvstrata/sim"
)

type capacityCmd struct {
	Trace      string `help:"A trace in Mooncake's format." type:"path" required:"" placeholder:"FILE"`
	Engines    int    `help:"Deal the requests in turn to so many engines, each with a cache of its own." default:"1"`
	BlockSize  int    `help:"Full blocks of so many tokens, a divisor of 512; 0: the trace's own, 512 tokens, the last of a prompt what remains." default:"0"`
	BlockBytes uint64 `help:"Bytes of a block, to tell sizes in bytes; 0: unknown." default:"0"`
	Blocks     uint64 `help:"Blocks of each cache now: also says what ×0.75, ×1.25 and ×2 of them hit; 0: unknown." default:"0"`
	MaxBlocks  int    `help:"Blocks tracked at most; where there are more, a sample is looked at." default:"4194304"`
	Order      string `help:"Which of a request's blocks is the newest: tail: its first, as engines free them; prompt: its last." enum:"tail,prompt" default:"tail"`
	Format     string `help:"table, json or csv." enum:"table,json,csv" default:"table"`
}

// Help shows how it is used.
func (capacityCmd) Help() string {
	return `Says which part of a trace caches of all sizes would have hit. What a fleet's own events say: kvstrata query capacity.

Example:

  kvstrata capacity --trace conversation_trace.jsonl
  kvstrata capacity --trace conversation_trace.jsonl --engines 4 --blocks 5000 --format csv`
}

// capacityReport is what the command answers.
type capacityReport struct {
	Trace     string          `json:"trace"`
	Requests  int             `json:"requests"`
	BlockSize int             `json:"block_size"` // tokens
	Order     string          `json:"order"`
	Curves    []capacityCurve `json:"curves"`
}

// capacityCurve is the curve of one cache, or of all as one.
type capacityCurve struct {
	Cache     string         `json:"cache"`
	Exactness string         `json:"exactness"`
	Sample    uint64         `json:"sample"` // one of so many blocks was looked at
	Blocks    uint64         `json:"asked_blocks"`
	Tokens    uint64         `json:"asked_tokens"`
	Sizes     []capacitySize `json:"sizes"`
}

// capacitySize is what a cache of one size hits. BestBlocks is what no policy could exceed; nil = not known.
type capacitySize struct {
	Name       string  `json:"name,omitempty"` // knee, …; empty for a round size
	Blocks     uint64  `json:"blocks"`
	Tokens     uint64  `json:"tokens"`
	Bytes      uint64  `json:"bytes,omitempty"`
	HitBlocks  uint64  `json:"hit_blocks"`
	HitTokens  uint64  `json:"hit_tokens"`
	HitRate    float64 `json:"hit_rate"` // of blocks
	TokenRate  float64 `json:"token_hit_rate"`
	BestBlocks *uint64 `json:"best_hit_blocks"`
}

// Run reads the trace once and prints the curves.
func (c *capacityCmd) Run(a *app) error {
	if c.Engines < 1 || c.Engines > 1024 {
		return usagef("--engines %d: want 1 to 1024", c.Engines)
	}
	if c.BlockSize < 0 || c.BlockSize > 0 && traceBlock%c.BlockSize != 0 {
		return usagef("--block-size %d: want a divisor of %d", c.BlockSize, traceBlock)
	}
	cfg := capacity.Config{MaxBlocks: c.MaxBlocks}
	if c.Order == "prompt" {
		cfg.Order = capacity.PromptOrder
	}
	if err := cfg.Validate(); err != nil {
		return usagef("--max-blocks: %w", err)
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return usagef("--trace %s: %w", c.Trace, err)
	}
	defer f.Close()
	r, err := c.report(cfg, sim.NewTraceReader(f))
	if err != nil {
		return err
	}
	switch c.Format {
	case "json":
		enc := json.NewEncoder(a.stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	case "csv":
		return r.printCSV(a.stdout)
	default:
		return r.printTable(a.stdout)
	}
}

// traceBlock is how many tokens a hash id of a trace stands for.
const traceBlock = 512

// measured is one cache, or all as one.
type measured struct {
	name string
	lru  *capacity.Stack
	best *capacity.Optimum
}

func newMeasured(name string, cfg capacity.Config) (*measured, error) {
	lru, err := capacity.NewStack(cfg)
	return &measured{name: name, lru: lru, best: capacity.NewOptimum(0, cfg.MaxBlocks)}, err
}

func (m *measured) request(blocks []capacity.Block) {
	m.lru.Request(blocks)
	m.best.Request(blocks)
}

func (c *capacityCmd) report(cfg capacity.Config, trace *sim.TraceReader) (*capacityReport, error) {
	r := &capacityReport{Trace: c.Trace, BlockSize: c.BlockSize, Order: cfg.Order.String()}
	if r.BlockSize == 0 {
		r.BlockSize = traceBlock
	}
	all, err := newMeasured("one cache", cfg)
	if err != nil {
		return nil, err
	}
	caches := []*measured{all}
	for i := 0; c.Engines > 1 && i < c.Engines; i++ {
		engine, err := newMeasured("engine "+strconv.Itoa(i), cfg)
		if err != nil {
			return nil, err
		}
		caches = append(caches, engine)
	}
	var blocks []capacity.Block
	for {
		t, err := trace.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", c.Trace, err)
		}
		blocks = c.blocks(blocks[:0], &t)
		all.request(blocks)
		if c.Engines > 1 {
			caches[1+r.Requests%c.Engines].request(blocks)
		}
		r.Requests++
	}
	for _, m := range caches {
		r.Curves = append(r.Curves, c.curve(m, r.BlockSize))
	}
	return r, nil
}

// blocks appends a request's blocks. An id names a prefix; so do the blocks in which its tokens lie.
func (c *capacityCmd) blocks(blocks []capacity.Block, t *sim.TraceRequest) []capacity.Block {
	if c.BlockSize == 0 {
		for i, id := range t.HashIDs {
			hash := uint64(event.Mix64(event.IntHash(id), 0, event.GPU))
			blocks = append(blocks, capacity.Block{Hash: hash, Tokens: uint32(min(traceBlock, t.InputLength-traceBlock*i))})
		}
		return blocks
	}
	within := traceBlock / c.BlockSize
	for i := range t.InputLength / c.BlockSize {
		hash := uint64(event.Mix64(event.IntHash(t.HashIDs[i/within]), event.Group(i%within), event.GPU))
		blocks = append(blocks, capacity.Block{Hash: hash, Tokens: uint32(c.BlockSize)})
	}
	return blocks
}

// curve tells round sizes, the multiples of the present one, and where the curve bends and ends, by size.
func (c *capacityCmd) curve(m *measured, blockSize int) capacityCurve {
	curve := m.lru.Curve()
	out := capacityCurve{
		Cache: m.name, Exactness: "exact", Sample: 1 << curve.Shift, Blocks: curve.Asked.Blocks, Tokens: curve.Asked.Tokens,
	}
	if curve.Shift > 0 {
		out.Exactness = "sampled"
	}
	names := make(map[uint64][]string)
	for _, size := range curve.Grid() {
		names[size] = nil
	}
	name := func(size uint64, name string) {
		if size > 0 {
			names[size] = append(names[size], name)
		}
	}
	for _, f := range []float64{0.75, 1, 1.25, 2} {
		name(uint64(math.Round(f*float64(c.Blocks))), "×"+strconv.FormatFloat(f, 'f', -1, 64))
	}
	end, _ := curve.Ceiling()
	name(curve.Knee(), "knee")
	name(curve.Reaching(0.99), "99 % of all")
	name(end, "all")
	for size, called := range names {
		hits := curve.Hits(size)
		s := capacitySize{
			Name: strings.Join(called, ", "), Blocks: size, Tokens: size * uint64(blockSize), Bytes: size * c.BlockBytes,
			HitBlocks: hits.Blocks, HitTokens: hits.Tokens,
		}
		if curve.Asked.Blocks > 0 {
			s.HitRate = float64(hits.Blocks) / float64(curve.Asked.Blocks)
			s.TokenRate = float64(hits.Tokens) / float64(curve.Asked.Tokens)
		}
		if best, ok := m.best.Hits(size); ok {
			s.BestBlocks = &best.Blocks
		}
		out.Sizes = append(out.Sizes, s)
	}
	slices.SortFunc(out.Sizes, func(a, b capacitySize) int { return cmp.Compare(a.Blocks, b.Blocks) })
	return out
}

// printTable prints the curves for people, each with bars.
func (r *capacityReport) printTable(w io.Writer) error {
	fmt.Fprintf(w, "%s: %d requests, blocks of %d tokens, %s\n", r.Trace, r.Requests, r.BlockSize, r.Order)
	for i := range r.Curves {
		c := &r.Curves[i]
		fmt.Fprintf(w, "\n%s: %d blocks were asked for, %d tokens; %s", c.Cache, c.Blocks, c.Tokens, c.Exactness)
		if c.Sample > 1 {
			fmt.Fprintf(w, ", of one of %d blocks", c.Sample)
		}
		fmt.Fprint(w, "\n\n")
		t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
		bytes := len(c.Sizes) > 0 && c.Sizes[len(c.Sizes)-1].Bytes > 0
		head := "BLOCKS\tTOKENS\t"
		if bytes {
			head += "BYTES\t"
		}
		fmt.Fprintln(t, head+"HITS\tOF BLOCKS\tOF TOKENS\tBEST OF BLOCKS\t")
		for j := range c.Sizes {
			s := &c.Sizes[j]
			best := "–"
			if s.BestBlocks != nil {
				best = percent(*s.BestBlocks, c.Blocks, 2)
			}
			line := fmt.Sprintf("%d\t%d\t", s.Blocks, s.Tokens)
			if bytes {
				line += byteSize(float64(s.Bytes)) + "\t"
			}
			fmt.Fprintf(t, "%s%d\t%s\t%s\t%s\t%s\n", line, s.HitBlocks, percent(s.HitBlocks, c.Blocks, 2), percent(s.HitTokens, c.Tokens, 2), best, s.bar())
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	_, err := fmt.Fprint(w, `
Note: hits are of LRU; best is what a cache that knows the future hits, more than which no policy can.
Note: knee is where the curve is highest above the straight line from nothing to its end.
`)
	return err
}

// capacityBar is how wide all that is asked for is.
const capacityBar = 30

// bar draws the hits, behind them the name.
func (s *capacitySize) bar() string {
	full := int(math.Round(capacityBar * s.HitRate))
	return strings.TrimRight("  "+strings.Repeat("█", full)+strings.Repeat("░", capacityBar-full)+"  "+s.Name, " ")
}

// printCSV prints the curves for programs.
func (r *capacityReport) printCSV(w io.Writer) error {
	out := csv.NewWriter(w)
	rows := [][]string{{
		"cache", "name", "blocks", "tokens", "bytes", "hit_blocks", "of_blocks", "hit_tokens", "of_tokens", "best_hit_blocks", "sample",
	}}
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	for _, c := range r.Curves {
		for _, s := range c.Sizes {
			bytes, best := "", ""
			if s.Bytes > 0 {
				bytes = number(s.Bytes)
			}
			if s.BestBlocks != nil {
				best = number(*s.BestBlocks)
			}
			rows = append(rows, []string{
				c.Cache, s.Name, number(s.Blocks), number(s.Tokens), bytes, number(s.HitBlocks), number(c.Blocks), number(s.HitTokens), number(c.Tokens),
				best, number(c.Sample),
			})
		}
	}
	return out.WriteAll(rows)
}
