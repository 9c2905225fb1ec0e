package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"kvstrata/connector"
	"kvstrata/connector/device"
	"kvstrata/event"
)

// KVConfig says what the KV of an engine's blocks is like, and which connector moves it. The bytes are real; what is in
// them is derived from the prefix that a block ends, so that a wrong byte is seen.
type KVConfig struct {
	Factory  *connector.Factory
	Transfer connector.Config
	Model    string

	Layers       int
	KVHeads      int // of one rank
	HeadSize     int
	ElementBytes int
	Ranks        int

	Source  event.Source           // the connector's, in records
	Hasher  event.Hasher           // names the blocks: engines' events do, a connector's LOADED must do it itself
	Events  Publisher              // takes what the connector tells, a batch a step
	Records func(event.Records)    // takes its records, and how much of each prompt was there
	Stats   func(*connector.Stats) // takes its statistics, step by step; nil when there are none
	Log     *slog.Logger
}

// DefaultKVConfig is 4 layers of 2 heads of 64 elements of 2 bytes: 32 KiB a block of 16 tokens.
func DefaultKVConfig() KVConfig {
	return KVConfig{Model: "sim", Layers: 4, KVHeads: 2, HeadSize: 64, ElementBytes: 2, Ranks: 1}
}

// Validate returns every problem of the configuration, joined; nil when there is none.
func (c *KVConfig) Validate() error {
	var problems []error
	check := func(ok bool, name string, value int) {
		if !ok {
			problems = append(problems, fmt.Errorf("%s %d: out of range", name, value))
		}
	}
	check(c.Layers >= 1 && c.Layers <= 256, "layers", c.Layers)
	check(c.KVHeads >= 1 && c.KVHeads <= 256, "kv-heads", c.KVHeads)
	check(c.HeadSize >= 8 && c.HeadSize%8 == 0 && c.HeadSize <= 4096, "head-size", c.HeadSize)
	check(c.ElementBytes == 1 || c.ElementBytes == 2 || c.ElementBytes == 4, "element-bytes", c.ElementBytes)
	check(c.Ranks >= 1 && c.Ranks <= 64, "ranks", c.Ranks)
	if c.Factory == nil || c.Events == nil || c.Records == nil || c.Stats == nil || c.Log == nil {
		problems = append(problems, errors.New("a factory, where events, records and statistics go, and a logger are needed"))
	}
	return errors.Join(problems...)
}

// kv is an engine's KV: memory for its blocks, and the connector that moves them.
type kv struct {
	cfg     KVConfig
	conn    *connector.Engine
	asked   *connector.Asked   // its scheduler's half
	memory  []device.Memory    // a rank
	caches  []*connector.Cache // a rank
	content hasher             // names contents: the same on every engine

	remote   []*sequence          // loads under way
	delayed  map[string][]BlockID // finished requests whose blocks are still read
	finished []string             // requests that finished since the last step
	step     connector.Step
}

// contentSeed makes every engine call the same content the same.
const contentSeed = 0x6b76

// Connect gives the engine's blocks memory, and a connector. It is called before the first request; Run runs the
// connector, and Close frees the memory after that.
func (e *Engine) Connect(cfg KVConfig) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	k := &kv{cfg: cfg, content: newHasher(contentSeed), delayed: make(map[string][]BlockID)}
	model := connector.Model{
		Name: cfg.Model, DType: "float16", Layers: cfg.Layers, KVHeads: cfg.KVHeads * cfg.Ranks, HeadSize: cfg.HeadSize,
		BlockTokens: e.cfg.BlockSize, Ranks: cfg.Ranks,
	}
	setup := connector.Setup{Config: cfg.Transfer, Instance: e.cfg.Name, Model: model, Log: cfg.Log}
	ranks := make([]connector.Caches, 0, cfg.Ranks)
	for range cfg.Ranks {
		tensors, size := k.tensors(e.cfg.PoolBlocks, e.cfg.BlockSize)
		memory, err := device.Host{}.Alloc(e.cfg.Name, size)
		if err != nil {
			return errors.Join(err, k.close())
		}
		k.memory = append(k.memory, memory)
		caches := connector.Caches{Device: device.Host{}, Memory: memory, Tensors: tensors, Model: model}
		cache, err := connector.NewCache(caches)
		if err != nil {
			return errors.Join(err, k.close())
		}
		k.caches, ranks = append(k.caches, cache), append(ranks, caches)
	}
	conn, err := connector.NewEngine(cfg.Factory, setup, ranks)
	if err != nil {
		return errors.Join(err, k.close())
	}
	k.asked = connector.NewAsked(conn.Scheduler, e.cfg.BlockSize)
	conn.Scheduler = k.asked
	k.conn, e.kv = conn, k
	return nil
}

// tensors lays the cache out as vLLM's FlashAttention backend does: one tensor a layer, keys before values, and in a block
// token before head.
func (k *kv) tensors(blocks, size int) (tensors []connector.Tensor, bytes int) {
	layer := 2 * blocks * size * k.cfg.KVHeads * k.cfg.HeadSize * k.cfg.ElementBytes
	for i := range k.cfg.Layers {
		tensors = append(tensors, connector.Packed(fmt.Sprintf("model.layers.%d.self_attn.attn", i), i*layer, k.cfg.ElementBytes,
			connector.Dim{Axis: connector.AxisKV, Size: 2}, connector.Dim{Axis: connector.AxisBlock, Size: blocks},
			connector.Dim{Axis: connector.AxisToken, Size: size}, connector.Dim{Axis: connector.AxisHead, Size: k.cfg.KVHeads},
			connector.Dim{Axis: connector.AxisDim, Size: k.cfg.HeadSize}))
	}
	return tensors, k.cfg.Layers * layer
}

func (k *kv) close() error {
	var errs []error
	for _, m := range k.memory {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Run runs the connector until ctx ends; without one it waits for that.
func (e *Engine) Run(ctx context.Context) error {
	if e.kv == nil {
		<-ctx.Done()
		return nil
	}
	return e.kv.conn.Run(ctx)
}

// Close frees the memory of the blocks.
func (e *Engine) Close() error {
	if e.kv == nil {
		return nil
	}
	return e.kv.close()
}

// Pending reports whether steps must go on though no request may be scheduled: transfers are under way, or blocks wait for
// a consumer.
func (e *Engine) Pending() bool {
	return e.kv != nil && (len(e.kv.remote)+len(e.kv.delayed) > 0 || e.kv.conn.Scheduler.Pending())
}

// matched asks the connector what it can bring of a waiting request beyond the tokens that are cached here.
func (e *Engine) matched(s *sequence, computed int) connector.Match {
	if s.kv == nil {
		s.kv = &connector.Request{ID: s.ID, Prompt: len(s.Prompt), LoRA: s.LoRA, Salt: s.Salt, Session: s.Session, Tenant: s.Tenant, Params: s.Params, TokenIDs: s.Prompt}
		e.kv.conn.Scheduler.NewRequest(s.kv)
	}
	s.kv.Tokens = s.tokens()
	e.hash(s, len(s.Prompt)/e.cfg.BlockSize)
	e.nameKV(s, len(s.Prompt)/e.cfg.BlockSize)
	m := e.kv.conn.Scheduler.MatchedTokens(s.kv, computed)
	m.Tokens = max(0, min(m.Tokens, len(s.Prompt)-computed)) // of one that was preempted, more may be there than the prompt
	return m
}

// nameKV makes sure that the connector knows the names of a sequence's first n blocks, which have hashes.
func (e *Engine) nameKV(s *sequence, n int) {
	size, seed := e.cfg.BlockSize, uint64(0)
	for i := len(s.kv.Names); i < n; i++ {
		if seed == 0 {
			seed = e.kv.cfg.Hasher.Seed(s.LoRA, s.Salt)
		}
		parent := event.PrefixHash(0)
		if i > 0 {
			parent = s.kv.Names[i-1].Prefix
		}
		s.kv.Names = append(s.kv.Names, connector.Name{
			Hash: e.name(s.hashes[i]), Prefix: event.Chain(parent, event.LocalHash(s.slice(i*size, (i+1)*size), seed)),
		})
	}
}

// allocated tells the connector which blocks a sequence has got.
func (e *Engine) allocated(s *sequence, computed, external int) {
	e.kv.conn.Scheduler.UpdateAfterAlloc(s.kv, ints(s.blocks), computed, external)
}

func ints(blocks []BlockID) []int {
	out := make([]int, len(blocks))
	for i, b := range blocks {
		out[i] = int(b)
	}
	return out
}

// transfer runs the connector's half of a step: the blocks that are computed in it get their content, and what has come
// about is taken in.
func (e *Engine) transfer(progress *Progress) error {
	k := e.kv
	k.step.Scheduled = k.step.Scheduled[:0]
	for _, s := range e.running {
		if s.scheduled > 0 {
			s.kv.Tokens = s.tokens()
			e.nameKV(s, min(len(s.hashes), (s.computed+s.scheduled)/e.cfg.BlockSize))
			k.step.Scheduled = append(k.step.Scheduled, connector.Scheduled{
				Request: s.kv, Blocks: ints(s.blocks), Computed: s.computed + s.scheduled,
			})
		}
	}
	out, err := k.conn.Step(context.Background(), &k.step, k.finished, e.compute)
	k.step.Preempted, k.finished = k.step.Preempted[:0], k.finished[:0]
	if err != nil {
		return fmt.Errorf("connector of %s: %w", e.cfg.Name, err)
	}
	k.cfg.Stats(out.Stats)
	for _, s := range k.remote { // told at the latest with the request's arrival, and often before: ranks end one by one
		s.spoil(out.InvalidBlocks)
	}
	for _, id := range out.FinishedSending {
		if blocks, ok := k.delayed[id]; ok {
			e.pool.Release(blocks)
			delete(k.delayed, id)
		}
	}
	for _, id := range out.FinishedReceiving {
		for i, s := range k.remote {
			if s.ID == id {
				k.remote = append(k.remote[:i], k.remote[i+1:]...)
				progress.Arrived++
				if slices.Contains(out.FailedReceiving, id) && len(s.invalid) == 0 {
					s.spoil(ints(s.blocks)) // it failed, and nobody says where
				}
				e.arrived(s, progress)
				break
			}
		}
	}
	return nil
}

// compute gives the blocks that this step computes their content.
func (e *Engine) compute() error {
	size := e.cfg.BlockSize
	for _, s := range e.running {
		if s.scheduled == 0 {
			continue
		}
		to := s.computed + s.scheduled
		for i := s.computed / size; i*size < to; i++ {
			if err := e.kv.fill(int(s.blocks[i]), e.contentOf(s, i, to)); err != nil {
				return err
			}
		}
	}
	for _, w := range e.kv.conn.Workers() {
		for _, t := range e.kv.caches[0].Caches().Tensors {
			if err := errors.Join(w.WaitForLayer(context.Background(), t.Name), w.SaveLayer(context.Background(), t.Name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// contentOf names the content of a sequence's block i when its first tokens up to one are computed.
func (e *Engine) contentOf(s *sequence, i, to int) uint64 {
	size, content := e.cfg.BlockSize, &e.kv.content
	for n := len(s.content); n < i || n == i && (i+1)*size <= to; n++ {
		s.content = append(s.content, content.block(s.contentBefore(content, n), s.slice(n*size, (n+1)*size), s.extraKeys(n)))
	}
	if i < len(s.content) && (i+1)*size <= to {
		return s.content[i]
	}
	return content.block(s.contentBefore(content, i), s.slice(i*size, to), s.extraKeys(i))
}

func (s *sequence) contentBefore(content *hasher, i int) uint64 {
	if i == 0 {
		return content.none
	}
	return s.content[i-1]
}

// fill writes a block's content on every rank.
func (k *kv) fill(block int, content uint64) error {
	for rank, cache := range k.caches {
		w, err := cache.Scatter([]int{block})
		if err != nil {
			return err
		}
		x := mix(content + uint64(rank))
		for _, p := range w.Pieces {
			for ; len(p) >= 8; p = p[8:] {
				x += golden
				binary.LittleEndian.PutUint64(p, mix(x))
			}
		}
		w.Release()
	}
	return nil
}

// holds reports whether a block has its content, byte for byte, on every rank.
func (k *kv) holds(block int, content uint64) (bool, error) {
	right := true
	for rank, cache := range k.caches {
		w, err := cache.Gather(context.Background(), []int{block})
		if err != nil {
			return false, err
		}
		x := mix(content + uint64(rank))
		for _, p := range w.Pieces {
			for ; len(p) >= 8; p = p[8:] {
				x += golden
				right = right && binary.LittleEndian.Uint64(p) == mix(x)
			}
		}
		w.Release()
	}
	return right, nil
}

// spoil notes which of a sequence's blocks did not come.
func (s *sequence) spoil(blocks []int) {
	for _, b := range blocks {
		if slices.Contains(s.blocks, BlockID(b)) {
			if s.invalid == nil {
				s.invalid = make(map[BlockID]struct{})
			}
			s.invalid[BlockID(b)] = struct{}{}
		}
	}
}

// arrived takes in a load that has ended: what came is checked and cached, and the request runs on from there.
func (e *Engine) arrived(s *sequence, progress *Progress) {
	size, end := e.cfg.BlockSize, s.computed+s.incoming
	from, came := s.computed/size, end
	for i := from; i*size < end; i++ {
		if _, failed := s.invalid[s.blocks[i]]; failed {
			came = min(came, i*size)
			e.stats.BlocksFailed++
			continue
		}
		right, err := e.kv.holds(int(s.blocks[i]), e.contentOf(s, i, min((i+1)*size, end)))
		if err != nil || !right {
			e.stats.BlocksWrong++
		}
		e.stats.BlocksVerified++
	}
	e.stats.LoadedTokens += uint64(came - s.computed)
	e.stats.BlocksLoaded += uint64(max(came/size-from, 0))
	s.computed, s.incoming, s.loading, s.invalid = came, 0, false, nil
	if came < end && e.kv.cfg.Transfer.OnLoadFailure == connector.Fail {
		e.stats.Failed++
		e.finish(s, connector.EndLoadError, progress)
		return
	}
	if s.computed == s.tokens() { // the next token comes from the last one's computation
		s.computed--
	}
	e.allocated(s, s.computed, 0)
	e.cache(s, came/size)
	e.running = append(e.running, s)
}

// finish lets a request go, and its blocks unless the connector still reads them.
func (e *Engine) finish(s *sequence, end connector.End, progress *Progress) {
	delete(e.live, s.ID)
	done := s.Request
	delayed := false
	if e.kv != nil {
		s.kv.Tokens = s.tokens()
		delayed, done.Params = e.kv.conn.Scheduler.RequestFinished(s.kv, ints(s.blocks), end)
		e.kv.finished = append(e.kv.finished, s.ID)
	}
	if delayed {
		e.kv.delayed[s.ID] = s.blocks
	} else {
		e.release(s)
	}
	e.stats.Finished++
	progress.Finished = append(progress.Finished, done)
}

// tell publishes what the connector has to tell of a step.
func (k *kv) tell(now event.Time) error {
	if events := k.conn.Scheduler.TakeEvents(); len(events) > 0 {
		if err := k.cfg.Events.Publish(&event.Batch{Time: now, Rank: -1, Events: events}); err != nil {
			return err
		}
	}
	if records := k.asked.TakeAll(k.cfg.Source, now); records.Len() > 0 {
		k.cfg.Records(records)
	}
	return nil
}
