package main

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/server"
	"kvstrata/web"
)

// addWeb adds the dashboard, and what it shows: an index, and the queries.
func (s *stack) addWeb(hashKey string, share shareFlags, flags historyFlags, data string, roles []string) error {
	if err := s.addPrefix(hashKey, share); err != nil {
		return err
	}
	cfg, err := flags.config(data)
	if err != nil {
		return err
	}
	cfg.HashKey = hashKey
	if err := s.addReader(cfg); err != nil {
		return err
	}
	rates, loads, tail := web.NewRates(time.Now), web.NewLoads(time.Now, web.DefaultPairs), web.NewTail()
	s.observers = append(s.observers, rates.Observe, loads.Observe, tail.Observe)
	now := time.Now()
	live := &livePanels{
		stack: s, rates: rates, asked: []askedAt{{at: now}},
		meta: metaDoc{Version: version, Started: now.UnixMilli(), Roles: roles},
	}
	hub, err := web.New(web.DefaultConfig(), []web.Panel{
		{Collect: live.sources},
		rates.Points(),
		loads.Panel(),
		{Every: time.Second, Collect: live.services},
		{Every: time.Second, Collect: live.hits},
		{Every: time.Second, Collect: live.prefixes},
	}, tail, s.app.log, s.registry)
	if err != nil {
		return err
	}
	h := hub.Handler()
	s.handlers["/"], s.handlers["/v1/live"] = h, h
	var running atomic.Bool
	s.ready = append(s.ready, server.Ready{Name: "web", Check: func() error {
		if !running.Load() {
			return errors.New("not started")
		}
		return nil
	}})
	s.runs = append(s.runs, func(ctx context.Context) error {
		running.Store(true)
		return hub.Run(ctx)
	})
	return nil
}

// livePanels are the documents of the live socket, as docs/api.md has them. The hub calls them from one goroutine.
type livePanels struct {
	stack *stack
	rates *web.Rates
	meta  metaDoc

	asked []askedAt // the newest from before hitWindow, and all since
}

type metaDoc struct {
	Version string   `json:"version"`
	Started int64    `json:"started"`
	Roles   []string `json:"roles"`
}

// sourceDoc is one source.
type sourceDoc struct {
	ID string `json:"id"`
	event.Source
	State   event.State `json:"state"`
	Reason  string      `json:"reason"`
	Epoch   event.Epoch `json:"epoch"`
	Started bool        `json:"started"`
	Seq     event.Seq   `json:"seq"`
	Behind  uint64      `json:"behind"`
	Lag     *float64    `json:"lag_ms,omitempty"`
	Heard   int64       `json:"last_event,omitempty"`
	web.Counts
	Rate      web.PerSecond     `json:"rate"`
	Tiers     []prefix.TierInfo `json:"tiers"`
	Pool      uint64            `json:"pool"`
	BlockSize uint32            `json:"block_size"`
	Copies    string            `json:"copies"`
	Ledger    ledgerDoc         `json:"ledger"`
	Balanced  bool              `json:"balanced"`
	Holes     int               `json:"holes"`
	Digest    prefix.DigestInfo `json:"digest"`
	Dialect   string            `json:"dialect"`
	Endpoint  string            `json:"endpoint"`
	Oddities  []event.Counter   `json:"oddities,omitempty"`
}

// ledgerDoc is a ledger without its list of holes.
type ledgerDoc struct {
	First      event.Seq `json:"first"`
	Last       event.Seq `json:"last"`
	Live       uint64    `json:"live"`
	Recovered  uint64    `json:"recovered"`
	Held       uint64    `json:"held"`
	Asked      uint64    `json:"asked"`
	Lost       uint64    `json:"lost"`
	Duplicates uint64    `json:"duplicates"`
	Malformed  uint64    `json:"malformed"`
	Dropped    uint64    `json:"dropped"`
}

func (l *livePanels) sources(_ time.Time, put func(string, any)) {
	for _, info := range l.stack.index.Sources() {
		id := info.Source.Tokens()
		counts, rate := l.rates.Source(info.Source)
		led := info.Ledger
		doc := sourceDoc{
			ID: id, Source: info.Source, State: info.State, Reason: info.Reason, Epoch: info.Epoch, Started: info.Started, Seq: info.LastSeq,
			Behind: info.Behind, Heard: info.Heard, Counts: counts, Rate: rate, Tiers: info.Resident, Pool: info.Pool, Copies: info.Copies,
			Ledger: ledgerDoc{
				First: led.First, Last: led.Last, Live: led.Live, Recovered: led.Recovered, Held: led.Held, Asked: led.Asked, Lost: led.Lost,
				Duplicates: led.Duplicates, Malformed: led.Malformed, Dropped: led.Dropped,
			},
			Balanced: info.Balanced, Holes: len(led.Holes), Digest: info.Digest, Dialect: info.Dialect, Endpoint: info.Endpoint,
			Oddities: info.Oddities,
		}
		if info.Lag != nil {
			ms := float64(int64(*info.Lag*1e4)) / 10
			doc.Lag = &ms
		}
		if len(info.Groups) > 0 {
			doc.BlockSize = info.Groups[0].BlockSize
		}
		put("source/"+id, &doc)
	}
}

func (l *livePanels) services(_ time.Time, put func(string, any)) {
	put("meta", l.meta)
	nats := serviceDoc{Name: "nats", State: "ok"}
	if !l.stack.bus.Connected() {
		nats.State, nats.Reason = "down", "not connected; what is shown stands still"
	}
	put("service/nats", nats)
	index := serviceDoc{Name: "prefix", State: "ok"}
	if !l.stack.consumer.CaughtUp() {
		index.State, index.Reason = "behind", "the index is catching up with the stream"
	}
	put("service/prefix", index)
	put("service/history", l.stack.watch.get())
}

// hitWindow is the time that the hit rate is about.
const hitWindow = 5 * time.Minute

type askedAt struct {
	at    time.Time
	total prefix.Asked
}

// hitsDoc is what lookups of this process's index found. Engines' events tell no hits.
type hitsDoc struct {
	Reported      bool    `json:"reported"`
	From          string  `json:"from,omitempty"`
	WindowSeconds float64 `json:"window_seconds,omitempty"`
	prefix.Asked
}

func (l *livePanels) hits(now time.Time, put func(string, any)) {
	total := l.stack.index.Asked()
	l.asked = append(l.asked, askedAt{now, total})
	for len(l.asked) > 1 && now.Sub(l.asked[1].at) >= hitWindow {
		l.asked = l.asked[1:]
	}
	then := l.asked[0]
	doc := hitsDoc{Asked: prefix.Asked{
		Lookups: total.Lookups - then.total.Lookups, AskedBlocks: total.AskedBlocks - then.total.AskedBlocks,
		MatchedBlocks: total.MatchedBlocks - then.total.MatchedBlocks, AskedTokens: total.AskedTokens - then.total.AskedTokens,
		MatchedTokens: total.MatchedTokens - then.total.MatchedTokens,
	}}
	if doc.Reported = doc.Lookups > 0; doc.Reported {
		doc.From, doc.WindowSeconds = "lookups of this index", now.Sub(then.at).Round(time.Second).Seconds()
	}
	put("hits", doc)
}

// liveHot is how many prefixes the page shows.
const liveHot = 50

func (l *livePanels) prefixes(_ time.Time, put func(string, any)) {
	put("prefixes", map[string]any{"rows": l.stack.index.Hot(liveHot)})
}
