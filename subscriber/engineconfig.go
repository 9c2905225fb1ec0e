package subscriber

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvstrata/event"
)

// EngineConfig says where one rank of one engine is heard, and who it is.
type EngineConfig struct {
	Source   event.Source
	Endpoint string // of the live socket: tcp://host:port; or what is pulled: http://host:port/path, file:///path
	Replay   string // of the replay socket; empty = the engine has none
	Topic    string // prefix of the topics heard; empty = all
	Dialect  Dialect
	AsSet    bool   // report=full: re-reports and second copies look alike
	PoolSize uint64 // physical blocks of the engine's pool; 0 = unknown
	// BlockSize is for dialects that do not tell it (Dynamo's); 0 = unknown.
	BlockSize uint32
	Worker    string // Dynamo's worker_id; empty = the first that a recording names
	Curve     string // file of keys, where the engine's sockets are protected with CURVE; empty = they are open
	Hash      string // how the engine names its blocks (event/enginehash); empty = found from its runs with tokens
	HashSeed  string // its PYTHONHASHSEED, or root: and its root hash; empty = not told
}

// ParseEngine reads an engine as the --engine flag has it, one configuration a rank:
//
//	zmq+tcp://host:5557,model=NAME[,replay=tcp://host:5558][,instance=NAME][,cluster=NAME][,rank=0][,ranks=1]
//	                   [,topic=PREFIX][,dialect=NAME][,report=new|full][,pool=BLOCKS][,block=TOKENS][,curve=FILE]
//	                   [,hash=SCHEME][,hash-seed=SEED]
//	trtllm+http://host:8000/kv_cache_events,model=NAME…    TensorRT-LLM's event buffer, pulled
//	dynamo+file:///path,model=NAME,block=TOKENS[,worker=ID]…           what Dynamo's recorder writes
//
// ranks=N is N publishers on N consecutive ports, as vLLM's data-parallel ranks are. A Mooncake master's dialect, which is a
// store's, has to be named. All problems are told at once.
func ParseEngine(text string) ([]EngineConfig, error) {
	parts := strings.Split(text, ",")
	cfg := EngineConfig{Source: event.Source{Cluster: event.DefaultCluster, Origin: event.Engine}}
	p := engineParser{cfg: &cfg, ranks: 1}
	p.endpoint(parts[0])
	for i, option := range parts[1:] {
		name, value, ok := strings.Cut(option, "=")
		if !ok {
			p.fail("option %d: want name=value", i+1)
			continue
		}
		p.option(name, value)
	}
	if cfg.Source.Model == "" {
		p.fail("model is missing: add model=NAME, as the engine serves it")
	}
	if err := checkHashing(&cfg); err != nil {
		p.fail("%w", err)
	}
	if cfg.Source.Instance == "" {
		cfg.Source.Instance = defaultInstance(cfg.Endpoint)
	}
	p.pulled()
	all := p.expand()
	if len(p.errs) > 0 {
		return nil, fmt.Errorf("--engine %q: %w", shown(parts), errors.Join(p.errs...))
	}
	return all, nil
}

// defaultInstance returns what an engine is called when nobody named it: where it is reached, or the path of its recording.
func defaultInstance(endpoint string) string {
	scheme, rest, _ := strings.Cut(endpoint, "://")
	if u, err := url.Parse(endpoint); err == nil && scheme != "file" {
		return u.Host
	}
	return rest
}

const hidden = "[not shown]"

// shown returns the parts of a flag as an error may repeat them: without what could be a secret, in the right place or, for a slip,
// in another.
func shown(parts []string) string {
	all := []string{shownAddress(parts[0])}
	for _, option := range parts[1:] {
		name, value, ok := strings.Cut(option, "=")
		switch {
		case !ok:
			name, value = hidden, ""
		case name == "replay":
			value = "=" + shownAddress(value)
		case name != "hash-seed" && slices.Contains(engineOptions, name):
			value = "=" + value
		default:
			value = "=" + hidden
		}
		all = append(all, name+value)
	}
	return strings.Join(all, ",")
}

// shownAddress hides user, query and fragment of an address.
func shownAddress(text string) string {
	if strings.Contains(text, "+file://") {
		return text
	}
	if i := strings.LastIndex(text, "@"); i >= 0 {
		scheme := ""
		if before, _, ok := strings.Cut(text, "://"); ok {
			scheme = before + "://"
		}
		text = scheme + hidden + text[i:]
	}
	if i := strings.IndexAny(text, "?#"); i >= 0 {
		text = text[:i+1] + hidden
	}
	return text
}

// engineOptions are the names of options.
var engineOptions = []string{
	"model", "replay", "instance", "cluster", "rank", "ranks", "topic", "dialect", "report", "pool", "block", "worker", "curve", "hash", "hash-seed",
}

type engineParser struct {
	cfg   *EngineConfig
	ranks uint32
	errs  []error
}

func (p *engineParser) fail(format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf(format, args...))
}

func (p *engineParser) endpoint(text string) {
	switch scheme, endpoint, _ := strings.Cut(text, "+"); {
	case scheme == "zmq" && strings.HasPrefix(endpoint, "tcp://"):
		p.cfg.Endpoint = p.address("address", endpoint)
	case scheme == "trtllm" && (strings.HasPrefix(endpoint, "http://") || strings.HasPrefix(endpoint, "https://")):
		p.cfg.Endpoint, p.cfg.Dialect = endpoint, DialectTensorRT
		if u, err := url.Parse(endpoint); err != nil || u.Host == "" || u.User != nil || strings.ContainsAny(endpoint, "?#") {
			p.fail("address %q: want trtllm+http://host:port/kv_cache_events, without user, query and fragment: everybody is told where an engine is",
				shownAddress(text))
		}
	case scheme == "dynamo" && strings.HasPrefix(endpoint, "file:///"):
		p.cfg.Endpoint, p.cfg.Dialect = endpoint, DialectDynamo
	default:
		p.fail("address %q: want zmq+tcp://host:port, trtllm+http://host:port/kv_cache_events or dynamo+file:///path", shownAddress(text))
	}
}

// pulled checks what only sockets, or only certain dialects, can have.
func (p *engineParser) pulled() {
	sockets := strings.HasPrefix(p.cfg.Endpoint, "tcp://")
	if !sockets && (p.cfg.Replay != "" || p.cfg.Topic != "" || p.ranks > 1) {
		p.fail("replay=, topic= and ranks= are for engines with sockets")
	}
	switch p.cfg.Dialect {
	case DialectDynamo:
		p.cfg.AsSet = true // each store is told, and only the last copy's end
		if p.cfg.BlockSize == 0 {
			p.fail("block is missing: Dynamo's events do not tell it; add block=TOKENS, the engine's block size")
		}
	case DialectMooncake:
		// A store is counted as what it is: each object once, whoever reads it.
		p.cfg.Source.Origin, p.cfg.AsSet = event.Store, true
		if p.cfg.Replay != "" {
			p.fail("replay=: a Mooncake master has none")
		}
	}
}

func (p *engineParser) address(what, text string) string {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(text, "tcp://"))
	n, portErr := strconv.ParseUint(port, 10, 16)
	switch {
	case !strings.HasPrefix(text, "tcp://") || err != nil || portErr != nil || n == 0 || host == "":
		p.fail("%s %q: want tcp://host:port", what, shownAddress(text))
	case host == "*" || host == "0.0.0.0" || host == "::":
		p.fail("%s %q: %s is where an engine listens, not where it is reached; name its host", what, text, host)
	}
	return text
}

func (p *engineParser) option(name, value string) {
	switch name {
	case "replay":
		p.cfg.Replay = p.address("replay", value)
	case "model":
		p.cfg.Source.Model = value
	case "instance":
		p.cfg.Source.Instance = value
	case "cluster":
		p.cfg.Source.Cluster = value
	case "topic":
		p.cfg.Topic = value
	case "rank":
		p.cfg.Source.Rank = uint32(p.number(name, value, 0, 1<<16))
	case "ranks":
		p.ranks = uint32(p.number(name, value, 1, 1024))
	case "curve":
		p.cfg.Curve = value
	case "pool":
		p.cfg.PoolSize = p.number(name, value, 1, 1<<40)
	case "block":
		p.cfg.BlockSize = uint32(p.number(name, value, 1, maxBlockSize))
	case "worker":
		p.number(name, value, 0, math.MaxUint64)
		p.cfg.Worker = value
	case "dialect":
		dialect, err := ParseDialect(value)
		if err != nil {
			p.fail("%w", err)
		}
		p.cfg.Dialect = dialect
	case "report":
		if value != "new" && value != "full" {
			p.fail("report %q: want new or full", value)
		}
		p.cfg.AsSet = value == "full"
	case "hash":
		p.cfg.Hash = value
	case "hash-seed":
		p.cfg.HashSeed = value
	default:
		p.fail("%q: unknown; known are %s", name, strings.Join(engineOptions, ", "))
	}
}

func (p *engineParser) number(name, value string, least, most uint64) uint64 {
	n, err := strconv.ParseUint(value, 10, 64)
	if err != nil || n < least || n > most {
		p.fail("%s %q: want a number from %d to %d", name, value, least, most)
	}
	return n
}

// expand gives each rank its ports.
func (p *engineParser) expand() []EngineConfig {
	if len(p.errs) > 0 {
		return nil
	}
	var all []EngineConfig
	for i := range p.ranks {
		cfg := *p.cfg
		cfg.Source.Rank += i
		cfg.Endpoint = p.shift(cfg.Endpoint, i)
		if cfg.Replay != "" {
			cfg.Replay = p.shift(cfg.Replay, i)
		}
		all = append(all, cfg)
	}
	return all
}

// shift returns an address whose port is higher by a number.
func (p *engineParser) shift(address string, by uint32) string {
	if by == 0 {
		return address
	}
	host, port, _ := net.SplitHostPort(strings.TrimPrefix(address, "tcp://"))
	n, _ := strconv.ParseUint(port, 10, 32)
	if n += uint64(by); n > 65535 {
		p.fail("ranks: port %d of rank %d is past 65535", n, by)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.FormatUint(n, 10))
}

// ReadEngines reads a file of engines: one a line, as --engine has it; blank lines and lines that begin with # are
// skipped.
func ReadEngines(r io.Reader) ([]EngineConfig, error) {
	var all []EngineConfig
	var errs []error
	in := bufio.NewScanner(r)
	for line := 1; in.Scan(); line++ {
		text := strings.TrimSpace(in.Text())
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		engines, err := ParseEngine(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("line %d: %w", line, err))
		}
		all = append(all, engines...)
	}
	errs = append(errs, in.Err())
	return all, errors.Join(errs...)
}

// replay reports whether the engine's past can be asked for, and how long the answer may be silent.
func (c *EngineConfig) replay(timeout time.Duration) (has bool, silence time.Duration) {
	if strings.HasPrefix(c.Endpoint, "file://") {
		return true, recordingPatience
	}
	return c.Replay != "", timeout
}

// UniqueSources reports engines that claim to be the same source.
func UniqueSources(engines []EngineConfig) error {
	seen := make(map[event.Source]string)
	var errs []error
	for _, e := range engines {
		if other, ok := seen[e.Source]; ok {
			errs = append(errs, fmt.Errorf("engines at %s and %s are both %v; give one another instance=, cluster= or rank=",
				other, e.Endpoint, e.Source))
		}
		seen[e.Source] = e.Endpoint
	}
	return errors.Join(errs...)
}
