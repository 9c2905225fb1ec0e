package subscriber

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"kvstrata/event"
)

// EngineConfig says where one rank of one engine is heard, and who it is.
type EngineConfig struct {
	Source   event.Source
	Endpoint string // of the live socket: tcp://host:port
	Replay   string // of the replay socket; empty = the engine has none
	Topic    string // prefix of the topics heard; empty = all
	Dialect  string // "vllm", or "auto"
	AsSet    bool   // report=full: re-reports and second copies look alike
	PoolSize uint64 // physical blocks of the engine's pool; 0 = unknown
	Hash     string // how the engine names its blocks (event/enginehash); empty = found from its runs with tokens
	HashSeed string // its PYTHONHASHSEED, or root: and its root hash; empty = not told
}

// ParseEngine reads an engine as the --engine flag has it, one configuration a rank:
//
//	zmq+tcp://host:5557,model=NAME[,replay=tcp://host:5558][,instance=NAME][,cluster=NAME][,rank=0][,ranks=1]
//	                   [,topic=PREFIX][,dialect=auto|vllm][,report=new|full][,pool=BLOCKS][,hash=SCHEME][,hash-seed=SEED]
//
// ranks=N is N publishers on N consecutive ports, as vLLM's data-parallel ranks are. All problems are told at once.
func ParseEngine(text string) ([]EngineConfig, error) {
	parts := strings.Split(text, ",")
	cfg := EngineConfig{Source: event.Source{Cluster: event.DefaultCluster, Origin: event.Engine}, Dialect: "auto"}
	p := engineParser{cfg: &cfg, ranks: 1}
	p.endpoint(parts[0])
	for _, option := range parts[1:] {
		name, value, ok := strings.Cut(option, "=")
		if !ok {
			p.fail("%q: want name=value", option)
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
		cfg.Source.Instance = strings.TrimPrefix(cfg.Endpoint, "tcp://")
	}
	all := p.expand()
	if len(p.errs) > 0 {
		return nil, fmt.Errorf("--engine %q: %w", text, errors.Join(p.errs...))
	}
	return all, nil
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
	endpoint, ok := strings.CutPrefix(text, "zmq+")
	if !ok || !strings.HasPrefix(endpoint, "tcp://") {
		p.fail("address %q: want zmq+tcp://host:port", text)
		return
	}
	p.cfg.Endpoint = p.address("address", endpoint)
}

func (p *engineParser) address(what, text string) string {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(text, "tcp://"))
	n, portErr := strconv.ParseUint(port, 10, 16)
	switch {
	case !strings.HasPrefix(text, "tcp://") || err != nil || portErr != nil || n == 0 || host == "":
		p.fail("%s %q: want tcp://host:port", what, text)
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
	case "pool":
		p.cfg.PoolSize = p.number(name, value, 1, 1<<40)
	case "dialect":
		if value != "auto" && value != "vllm" {
			p.fail("dialect %q: want auto or vllm", value)
		}
		p.cfg.Dialect = value
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
		p.fail("%q: unknown; known are model, replay, instance, cluster, rank, ranks, topic, dialect, report, pool, hash and hash-seed", name)
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

func (p *engineParser) shift(address string, by uint32) string {
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
