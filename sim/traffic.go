package sim

import (
	"container/heap"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strconv"
	"time"
)

// TrafficConfig describes live traffic. Lengths are means of exponential distributions, cut at four times the mean.
type TrafficConfig struct {
	Seed     uint64
	Requests int     // after which the traffic ends; 0 = never
	Rate     float64 // requests a second of virtual time, bursts aside
	Chats    int     // conversations open at a time, bursts aside

	Tenants       int // the first is busiest; of three, one brings a cache salt and one a LoRA adapter
	SystemPrompts int // shared by the tenants in turn; salt and adapter keep their blocks apart all the same
	SystemTokens  int // of every system prompt
	UserTokens    int // mean, of one turn's question
	OutputTokens  int // mean, of one turn's answer
	Turns         int // of a conversation, at most
	MaxPrompt     int // tokens; a conversation that would exceed it ends

	BurstEvery time.Duration // 0 = no bursts
	BurstChats int           // conversations of one turn with one tenant, all within a second
}

// DefaultTrafficConfig is traffic that a few simulated engines serve easily.
func DefaultTrafficConfig() TrafficConfig {
	return TrafficConfig{
		Seed: 1, Rate: 4, Chats: 64, Tenants: 6, SystemPrompts: 3, SystemTokens: 800, UserTokens: 120, OutputTokens: 150,
		Turns: 12, MaxPrompt: 16_384, BurstEvery: 30 * time.Second, BurstChats: 20,
	}
}

// Validate returns every problem of the configuration, joined; nil when there is none.
func (c TrafficConfig) Validate() error {
	var problems []error
	atLeast := func(name string, value, least int) {
		const most = 1 << 20
		if value < least || value > most {
			problems = append(problems, fmt.Errorf("%s %d: want %d to %d", name, value, least, most))
		}
	}
	if c.Requests < 0 {
		problems = append(problems, fmt.Errorf("requests %d: want 0 (endless) or more", c.Requests))
	}
	if !(c.Rate >= 1e-3 && c.Rate <= 1e6) {
		problems = append(problems, fmt.Errorf("rate %v: want 0.001 to 1000000 requests a second", c.Rate))
	}
	atLeast("chats", c.Chats, 1)
	atLeast("tenants", c.Tenants, 1)
	atLeast("system-prompts", c.SystemPrompts, 1)
	atLeast("system-tokens", c.SystemTokens, 0)
	atLeast("user-tokens", c.UserTokens, 1)
	atLeast("output-tokens", c.OutputTokens, 1)
	atLeast("turns", c.Turns, 1)
	atLeast("max-prompt", c.MaxPrompt, c.SystemTokens+4*c.UserTokens)
	if c.BurstEvery < 0 || c.BurstEvery > 0 && c.BurstEvery < burstSpan {
		problems = append(problems, fmt.Errorf("burst-every %v: want 0 (none) or at least %v", c.BurstEvery, burstSpan))
	}
	atLeast("burst-chats", c.BurstChats, 0)
	return errors.Join(problems...)
}

// burstSpan is the time within which a burst's requests come.
const burstSpan = time.Second

// Traffic makes conversations: a turn's prompt is a system prompt, all earlier questions and answers, and a new
// question. Answers are what engines generate for the earlier turns ([AppendOutput]), so blocks filled by decoding are
// found again.
type Traffic struct {
	cfg TrafficConfig
}

// NewTraffic returns a generator.
func NewTraffic(cfg TrafficConfig) (*Traffic, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Traffic{cfg: cfg}, nil
}

// Arrivals yields requests in the order of time. It depends on the configuration alone: every call begins anew and
// yields the same. The error is always nil.
func (t *Traffic) Arrivals() iter.Seq2[Arrival, error] {
	return func(yield func(Arrival, error) bool) {
		c := newConversations(t.cfg)
		for n := 0; t.cfg.Requests == 0 || n < t.cfg.Requests; n++ {
			if !yield(c.next(), nil) {
				return
			}
		}
	}
}

// conversations is the state of one run of the generator.
type conversations struct {
	cfg   TrafficConfig
	rng   *rand.Rand
	open  chats
	count int           // opened so far
	burst time.Duration // when the next one begins
}

func newConversations(cfg TrafficConfig) *conversations {
	c := &conversations{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, vocabulary)), burst: cfg.BurstEvery}
	for range cfg.Chats {
		c.start(time.Duration(c.rng.Float64()*float64(c.pause())), false)
	}
	return c
}

// next returns the next arrival and readies its conversation for the turn after.
func (c *conversations) next() Arrival {
	if c.cfg.BurstEvery > 0 && c.burst <= c.open[0].at {
		tenant := c.tenant()
		for range c.cfg.BurstChats {
			c.start(c.burst+time.Duration(c.rng.Int64N(int64(burstSpan))), true).tenant = tenant
		}
		c.burst += c.cfg.BurstEvery
	}
	chat := c.open[0]
	a := Arrival{At: chat.at, Request: c.turn(chat)}
	switch {
	case chat.turn < chat.turns && len(chat.history)+4*c.cfg.UserTokens <= c.cfg.MaxPrompt:
		chat.at += c.think()
		heap.Fix(&c.open, 0)
	case chat.burst:
		heap.Pop(&c.open)
	default:
		heap.Pop(&c.open)
		c.start(chat.at+c.think(), false)
	}
	return a
}

// start opens a conversation whose first turn comes at a given time.
func (c *conversations) start(at time.Duration, burst bool) *chat {
	s := &chat{serial: c.count, at: at, burst: burst, tenant: c.tenant(), turns: 1}
	if !burst {
		s.turns += c.rng.IntN(c.cfg.Turns)
	}
	c.count++
	heap.Push(&c.open, s)
	return s
}

// turn builds the request of a conversation's next turn and appends question and answer to its history.
func (c *conversations) turn(s *chat) Request {
	if s.turn == 0 {
		system := uint64(s.tenant % c.cfg.SystemPrompts)
		s.history = appendTokens(nil, streamKey(c.cfg.Seed, 0, system), 0, c.cfg.SystemTokens, 0)
	}
	s.turn++
	question := streamKey(c.cfg.Seed, uint64(s.serial)+1, uint64(s.turn))
	s.history = appendTokens(s.history, question, 0, c.length(c.cfg.UserTokens), 0)
	session := "chat-" + strconv.Itoa(s.serial)
	r := Request{
		ID: session + "-turn-" + strconv.Itoa(s.turn), Session: session, Tenant: "tenant-" + strconv.Itoa(s.tenant), Output: c.length(c.cfg.OutputTokens),
		Prompt: s.history[:len(s.history):len(s.history)], // grows behind its end only
	}
	switch s.tenant % 3 {
	case 1:
		r.Salt = r.Tenant
	case 2:
		r.LoRA = "adapter-" + strconv.Itoa(s.tenant)
	}
	s.history = AppendOutput(s.history, r.ID, r.Output)
	return r
}

// tenant draws one; low numbers are likelier.
func (c *conversations) tenant() int {
	return min(c.rng.IntN(c.cfg.Tenants), c.rng.IntN(c.cfg.Tenants))
}

// pause is the mean time between two turns of one conversation that gives the rate over all of them.
func (c *conversations) pause() time.Duration {
	return time.Duration(float64(c.cfg.Chats) / c.cfg.Rate * float64(time.Second))
}

func (c *conversations) think() time.Duration {
	return time.Duration(min(c.rng.ExpFloat64(), 4) * float64(c.pause()))
}

func (c *conversations) length(mean int) int {
	return max(1, int(min(c.rng.ExpFloat64(), 4)*float64(mean)))
}

// streamKey names a stream of prompt tokens.
func streamKey(seed, a, b uint64) uint64 { return mix(mix(mix(seed)+a) + b) }

// chat is one conversation.
type chat struct {
	serial  int
	tenant  int
	burst   bool // of a burst: nobody takes its place
	turn    int  // taken
	turns   int  // in all
	at      time.Duration
	history []uint32
}

// chats is a heap by the time of the next turn; the serial breaks ties, so that the order is a function of the seed.
type chats []*chat

func (c chats) Len() int { return len(c) }

func (c chats) Less(i, j int) bool {
	if c[i].at != c[j].at {
		return c[i].at < c[j].at
	}
	return c[i].serial < c[j].serial
}

func (c chats) Swap(i, j int) { c[i], c[j] = c[j], c[i] }

func (c *chats) Push(x any) { *c = append(*c, x.(*chat)) }

func (c *chats) Pop() any {
	last := len(*c) - 1
	s := (*c)[last]
	(*c)[last] = nil
	*c = (*c)[:last]
	return s
}
