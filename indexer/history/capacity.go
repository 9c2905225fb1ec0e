package history

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
	"kvstrata/indexer/history/capacity"
)

// What the question capacity asks, one after the other. A sample is the blocks whose prefix hashes are small: hashes are
// uniform, the rows of an hour lie in their order, and only that share of them is read.
const (
	// How many rows there are, about: of one of 256 blocks.
	capacityRows = `SELECT countIf(committed >= toDateTime({first:Int64}, 'UTC')) AS in_window, count() AS kept
FROM block_events
WHERE hash <= 0x00ffffffffffffff AND committed <= toDateTime({last:Int64}, 'UTC') AND ` + ofSources

	capacityStored = `SELECT source, tier, countIf(op = 'STORED' AND named = 1) AS stored,
  sumIf(block_size, op = 'STORED' AND named = 1) AS tokens, countIf(op = 'STORED' AND named = 0) AS unnamed, countIf(op = 'LOADED') AS loaded
FROM block_events
WHERE hash <= {stored_hash:UInt64} AND (op = 'STORED' AND effect > 0 OR op = 'LOADED') AND ` + inSeconds + `
GROUP BY source, tier`

	// Since when what sources hold adds up: they began anew, were cleared, or were made anew from a checkpoint.
	capacityBegan = `SELECT source, toInt64(toUnixTimestamp(max(committed))) AS began, max((epoch, seq)) AS far, far.1, far.2 FROM (
  SELECT source, committed, epoch, seq FROM block_events WHERE hash = 0 AND op = 'CLEARED'
  UNION ALL SELECT source, toDateTime(committed, 'UTC') AS committed, epoch, if(kind = 'resync', last + 1, 0) AS seq FROM ledger
  WHERE kind IN ('life', 'resync'))
WHERE committed <= toDateTime({last:Int64}, 'UTC') AND ` + ofSources + `
GROUP BY source`

	capacityResident = `SELECT source, tier, sum(effect) AS copies
FROM block_events
WHERE hash <= {resident_hash:UInt64} AND committed <= toDateTime({last:Int64}, 'UTC')
  AND committed >= toDateTime(transform(source, {sources:Array(String)}, {began:Array(Int64)}, toInt64(0)), 'UTC')
  AND (epoch, seq) >= (transform(source, {sources:Array(String)}, {epochs:Array(UInt64)}, toUInt64(0)),
    transform(source, {sources:Array(String)}, {seqs:Array(UInt64)}, toUInt64(0))) AND ` + ofSources + `
GROUP BY source, tier`

	capacityEvents = `SELECT source, tier, kv_group, epoch, seq, ev, toUInt8(op), hash, copies, block_size
FROM block_events
WHERE hash <= {hash:UInt64} AND (named = 1 AND effect > 0 AND op = 'STORED' OR named = 1 AND effect < 0 AND op = 'EVICTED' OR op = 'CLEARED')
  AND ` + inSeconds + `
ORDER BY committed, source, epoch, seq, ev, pos`
)

// sampleRows is how many rows are read for the curves, at most about, and countedRows how many times as many ClickHouse
// counts for what was stored and for what is resident.
const (
	sampleRows  = 1 << 19
	countedRows = 16
)

// capacityFactors are the sizes that are asked about, over the present one.
var capacityFactors = []float64{0.75, 1, 1.25, 1.5, 2, 4}

var capacityColumns = []Column{
	{"model", "text", ""},
	{"engine", "text", ""},
	{"rank", "number", ""},
	{"tier", "text", ""},
	{"cache", "text", ""},
	{"size", "text", ""},
	{"blocks", "number", "blocks"},
	{"tokens", "number", "tokens"},
	{"bytes", "bytes", "B"},
	{"avoided", "number", "blocks"},
	{"of stored", "number", "blocks"},
	{"share", "ratio", ""},
	{"avoided tokens", "number", "tokens"},
	{"of tokens", "number", "tokens"},
}

var capacityNotes = []string{
	"engines report no hits, so that this is no hit rate: it says how many of the blocks that were stored, and so computed or loaded, another cache would have had",
	"memory: the engine's own with so many blocks, evicting in the same order as now; ×1 is what was resident when the window ended, or blocks=…; what less would cost can't be told without hits",
	"store: one shared by all engines of a model, into which each block goes as it is stored, LRU; its sizes are over all that engines hold",
	"a block that left before the window, and came back in it, counts as new: a longer window shows more",
}

// capacity answers what caches of other sizes would have had of what engines stored.
func (r *Reader) capacity(ctx context.Context, bound clickhouse.Parameters, a *Answer) error {
	var rows, kept uint64
	if err := r.query(ctx, capacityRows, bound, func(scan func(...any) error) error { return scan(&rows, &kept) }); err != nil {
		return err
	}
	sampled, stored, resident := shiftFor(rows<<8, r.sample), shiftFor(rows<<8, countedRows*r.sample), shiftFor(kept<<8, countedRows*r.sample)
	for name, shift := range map[string]int{"hash": sampled, "stored_hash": stored, "resident_hash": resident} {
		bound[name] = strconv.FormatUint(math.MaxUint64>>shift, 10)
	}
	w := newWorkingSet(sampled)
	if err := w.countStored(ctx, r, bound, stored); err != nil {
		return err
	}
	if err := w.countResident(ctx, r, bound, resident); err != nil {
		return err
	}
	looked := 0
	err := r.query(ctx, capacityEvents, bound, func(scan func(...any) error) error {
		var t told
		looked++
		if err := scan(&t.source, &t.tier, &t.group, &t.epoch, &t.seq, &t.ev, &t.op, &t.hash, &t.copies, &t.blockSize); err != nil {
			return err
		}
		return w.take(&t)
	})
	if err != nil {
		return err
	}
	w.done()
	a.SQL = explained(strings.Join([]string{capacityStored, capacityBegan, capacityResident, capacityEvents}, ";\n"), bound)
	blocks, _ := strconv.ParseUint(bound["blocks"], 10, 64) // numbers: they were checked
	blockBytes, _ := strconv.ParseUint(bound["block_bytes"], 10, 64)
	a.Rows = w.rows(blocks, blockBytes)
	if sampled > 0 || resident > 0 {
		a.Exactness = "sampled"
		a.Notes = append(a.Notes, fmt.Sprintf("sampled by hash: curves are of one of %d blocks (%d events), what was stored of one of %d, what is resident of one of %d",
			1<<sampled, looked, 1<<stored, 1<<resident))
	}
	if w.loaded > 0 {
		a.Notes = append(a.Notes, fmt.Sprintf("%d blocks were loaded from elsewhere, and so not computed where they were stored", w.loaded))
	}
	if w.unnamed > 0 {
		a.Notes = append(a.Notes, fmt.Sprintf("%d stored blocks have no prefix hash, and are left out", w.unnamed))
	}
	return r.noteHits(ctx, bound, a)
}

// noteHits says what lookups told of the hit rate with the caches as they are.
func (r *Reader) noteHits(ctx context.Context, bound clickhouse.Parameters, a *Answer) error {
	const told = `SELECT asker, sum(tokens * one_in), sum(matched * one_in), max(one_in) FROM lookups WHERE ` + inRecords + ` GROUP BY asker ORDER BY asker`
	return r.query(ctx, told, bound, func(scan func(...any) error) error {
		var asker string
		var asked, found uint64
		var oneIn uint32
		if err := scan(&asker, &asked, &found, &oneIn); err != nil || asked == 0 {
			return err
		}
		note := fmt.Sprintf("as the caches are, lookups told by %s found %d of %d tokens cached (%.1f %%)", asker, found, asked, 100*float64(found)/float64(asked))
		if oneIn > 1 {
			note += fmt.Sprintf(", from one lookup in %d", oneIn)
		}
		a.Notes = append(a.Notes, note+"; the query hits has them by time and tier")
		return nil
	})
}

// countStored counts what was stored, on one of 2^shift blocks.
func (w *workingSet) countStored(ctx context.Context, r *Reader, bound clickhouse.Parameters, shift int) error {
	return r.query(ctx, capacityStored, bound, func(scan func(...any) error) error {
		var source, tier string
		var stored capacity.Count
		var unnamed, loaded uint64
		if err := scan(&source, &tier, &stored.Blocks, &stored.Tokens, &unnamed, &loaded); err != nil {
			return err
		}
		w.unnamed, w.loaded = w.unnamed+unnamed<<shift, w.loaded+loaded<<shift
		p, err := w.pool(source, tier)
		if p != nil {
			p.stored = capacity.Count{Blocks: stored.Blocks << shift, Tokens: stored.Tokens << shift}
		}
		return err
	})
}

// countResident counts what engines hold when the window ends, on one of 2^shift blocks.
func (w *workingSet) countResident(ctx context.Context, r *Reader, bound clickhouse.Parameters, shift int) error {
	sources, began, epochs, seqs := []string{"''"}, []string{"0"}, []string{"0"}, []string{"0"}
	err := r.query(ctx, capacityBegan, bound, func(scan func(...any) error) error {
		var source string
		var at int64
		var far []any
		var epoch, seq uint64
		err := scan(&source, &at, &far, &epoch, &seq)
		sources = append(sources, "'"+source+"'") // as in a subject: nothing to escape
		began, epochs, seqs = append(began, fmt.Sprint(at)), append(epochs, fmt.Sprint(epoch)), append(seqs, fmt.Sprint(seq))
		return err
	})
	if err != nil {
		return err
	}
	for name, list := range map[string][]string{"sources": sources, "began": began, "epochs": epochs, "seqs": seqs} {
		bound[name] = "[" + strings.Join(list, ",") + "]"
	}
	return r.query(ctx, capacityResident, bound, func(scan func(...any) error) error {
		var source, tier string
		var copies int64
		if err := scan(&source, &tier, &copies); err != nil {
			return err
		}
		p, err := w.pool(source, tier)
		if p != nil {
			p.resident = uint64(max(copies, 0)) << shift
		}
		return err
	})
}

// shiftFor returns how often a number of rows must be halved to be no more than a bound.
func shiftFor(rows, most uint64) int {
	if rows == 0 {
		return 0
	}
	return bits.Len64((rows - 1) / most)
}

// told is one row of capacityEvents.
type told struct {
	source, tier string
	group        int32
	epoch, seq   uint64
	ev           uint32
	op           uint8
	hash         uint64
	copies       int32
	blockSize    uint32
}

// teller is an engine, or nobody: connectors and stores tell as well.
type teller struct {
	source event.Source
	engine bool
	epoch  uint64
	pools  []*pool
}

// pool is one tier of an engine.
type pool struct {
	tier      string
	victims   *capacity.Victims
	looked    capacity.Count // stored, of the sample
	stored    capacity.Count // stored, all
	resident  uint64         // blocks
	blockSize uint64         // tokens
}

// workingSet adds up what engines told.
type workingSet struct {
	cfg     capacity.Config
	tellers map[string]*teller
	stores  map[string]*capacity.Stack // by model
	unnamed uint64                     // blocks stored
	loaded  uint64                     // blocks

	last told // what the run is of
	run  []capacity.Block
}

func newWorkingSet(shift int) *workingSet {
	return &workingSet{
		cfg:     capacity.Config{Shift: uint8(shift), MaxBlocks: 1 << 20},
		tellers: make(map[string]*teller), stores: make(map[string]*capacity.Stack),
	}
}

func (w *workingSet) teller(id string) (*teller, error) {
	if t, ok := w.tellers[id]; ok {
		return t, nil
	}
	source, err := event.ParseSource(id)
	if err != nil {
		return nil, err
	}
	t := &teller{source: source, engine: source.Origin == event.Engine}
	w.tellers[id] = t
	if t.engine && w.stores[source.Model] == nil {
		w.stores[source.Model], err = capacity.NewStack(w.cfg)
	}
	return t, err
}

// pool returns a tier of a source; nil where that is no engine.
func (w *workingSet) pool(source, tier string) (*pool, error) {
	t, err := w.teller(source)
	if err != nil || !t.engine {
		return nil, err
	}
	for _, p := range t.pools {
		if p.tier == tier {
			return p, nil
		}
	}
	v, err := capacity.NewVictims(w.cfg)
	if err != nil {
		return nil, err
	}
	t.pools = append(t.pools, &pool{tier: tier, victims: v})
	return t.pools[len(t.pools)-1], nil
}

// take adds what a source told next. What stands under one sequence was told at once.
func (w *workingSet) take(e *told) error {
	if l := &w.last; e.source != l.source || e.epoch != l.epoch || e.seq != l.seq {
		w.done()
	} else if e.ev != l.ev {
		w.endRun()
	}
	w.last = *e
	t, err := w.teller(e.source)
	if err != nil || !t.engine {
		return err
	}
	if t.epoch != e.epoch || event.Kind(e.op) == event.Cleared {
		for _, p := range t.pools {
			p.victims.Cleared()
		}
		t.epoch = e.epoch
	}
	hash := e.hash ^ uint64(max(e.group, 0)) // each group has blocks of its own; no group is group 0
	switch event.Kind(e.op) {
	case event.Stored:
		w.run = append(w.run, capacity.Block{Hash: hash, Tokens: e.blockSize})
	case event.Evicted:
		if e.copies > 0 {
			return nil // it is still there
		}
		p, err := w.pool(e.source, e.tier)
		if err != nil {
			return err
		}
		p.victims.Evicted(hash)
	}
	return nil
}

// endRun hands a run of stored blocks over.
func (w *workingSet) endRun() {
	if len(w.run) == 0 {
		return
	}
	t := w.tellers[w.last.source]
	for _, p := range t.pools {
		if p.tier == w.last.tier {
			p.victims.Stored(w.run)
			p.blockSize = max(p.blockSize, uint64(w.run[0].Tokens))
			for i := range w.run {
				p.looked.Blocks++
				p.looked.Tokens += uint64(w.run[i].Tokens)
			}
		}
	}
	if w.last.tier == string(event.GPU) {
		w.stores[t.source.Model].Request(w.run)
	}
	w.run = w.run[:0]
}

// done ends what was told at once.
func (w *workingSet) done() {
	w.endRun()
	if t := w.tellers[w.last.source]; t != nil {
		for _, p := range t.pools {
			p.victims.Done()
		}
	}
}

// elsewhere is what was stored beside the sample. What came since it was counted makes it no less than nothing.
func (p *pool) elsewhere() capacity.Count {
	return capacity.Count{
		Blocks: max(p.stored.Blocks, p.looked.Blocks) - p.looked.Blocks, Tokens: max(p.stored.Tokens, p.looked.Tokens) - p.looked.Tokens,
	}
}

// asked is a cache that is asked about: whose it is, and what is known of it.
type asked struct {
	name       []any // of the row: model, engine, rank, tier, cache
	curve      *capacity.Curve
	present    uint64 // blocks that engines hold now
	beside     uint64 // blocks that the curve's sizes come on top of
	blockSize  uint64 // tokens
	blockBytes uint64
}

// row says what one size would have avoided; a size of 0 is one that never evicts.
func (q *asked) row(name string, size uint64, known bool) []any {
	row := append(slices.Clone(q.name), name)
	unit := func(n uint64) any {
		if n == 0 || size == 0 {
			return nil
		}
		return n * size
	}
	row = append(row, unit(1), unit(q.blockSize), unit(q.blockBytes))
	hits := q.curve.Hits(math.MaxUint64)
	if size != 0 {
		hits = q.curve.Hits(max(size, q.beside) - q.beside)
	}
	if !known {
		return append(row, nil, q.curve.Asked.Blocks, nil, nil, q.curve.Asked.Tokens)
	}
	return append(row, hits.Blocks, q.curve.Asked.Blocks, float64(hits.Blocks)/float64(q.curve.Asked.Blocks), hits.Tokens, q.curve.Asked.Tokens)
}

// rows are the sizes of one cache: multiples of what engines hold now, and where the curve bends and ends.
func (q *asked) rows() (rows [][]any) {
	if q.curve.Asked.Blocks == 0 {
		return nil
	}
	for _, f := range capacityFactors {
		if size := uint64(math.Round(f * float64(q.present))); size > 0 {
			rows = append(rows, q.row("×"+strconv.FormatFloat(f, 'f', -1, 64), size, size >= q.beside))
		}
	}
	if end, _ := q.curve.Ceiling(); end > 0 {
		rows = append(rows, q.row("knee", q.beside+q.curve.Knee(), true), q.row("99 % of all", q.beside+q.curve.Reaching(0.99), true))
	}
	return append(rows, q.row("without end", 0, true))
}

// rows answers: of each model a store of its engines, and then each engine's own memory. blocks is the size of every engine's
// memory now; 0 = what is resident.
func (w *workingSet) rows(blocks, blockBytes uint64) [][]any {
	ids := slices.SortedFunc(maps.Keys(w.tellers), func(a, b string) int {
		return cmp.Or(cmp.Compare(w.tellers[a].source.Model, w.tellers[b].source.Model), cmp.Compare(a, b))
	})
	var rows, memories [][]any
	var store *asked
	var model string
	flush := func() {
		if store != nil {
			store.curve = w.stores[model].Curve()
			rows = append(rows, store.rows()...)
		}
		rows = append(rows, memories...)
		store, memories = nil, nil
	}
	for _, id := range ids {
		t := w.tellers[id]
		if !t.engine {
			continue
		}
		if store == nil || t.source.Model != model {
			flush()
			model = t.source.Model
			store = &asked{name: []any{model, nil, nil, nil, "store"}, blockBytes: blockBytes}
		}
		for _, p := range t.pools {
			beside := p.elsewhere()
			p.victims.Elsewhere(beside)
			q := &asked{
				name: []any{model, t.source.Instance, t.source.Rank, p.tier, "memory"}, curve: p.victims.Curve(),
				present: cmp.Or(blocks, p.resident), blockSize: p.blockSize, blockBytes: blockBytes,
			}
			q.beside = q.present
			memories = append(memories, q.rows()...)
			if p.tier == string(event.GPU) && q.curve.Asked.Blocks > 0 {
				w.stores[model].Elsewhere(beside)
				store.present += q.present
				store.blockSize = max(store.blockSize, p.blockSize)
			}
		}
	}
	flush()
	return rows
}
