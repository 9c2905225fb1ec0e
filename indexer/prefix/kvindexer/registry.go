package kvindexer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"kvstrata/event"
)

// noSubscriber is said where engines can't be followed.
const noSubscriber = "no subscriber runs in this process, so that it follows no engines: register them where one does, and ask here"

func (s *Service) register(_ context.Context, f *fields) (int, any) {
	var (
		instance                uint64
		endpoint, replay, group string
		model, salt             string
		blockSize, rank         uint32
	)
	f.required("instance_id", &instance)
	f.required("endpoint", &endpoint)
	f.required("model_name", &model)
	f.group(&group)
	f.required("block_size", &blockSize)
	f.nullable("dp_rank", &rank)
	f.nullable("replay_endpoint", &replay)
	f.nullable("additional_salt", &salt) // of no use to Dynamo either: engines tell the salts of their blocks
	f.nullable("additionalsalt", &salt)
	if f.err != nil {
		return 0, nil
	}
	if err := checkEndpoint(endpoint); err != nil {
		return http.StatusBadRequest, answer{"error": err.Error()}
	}
	if raw, ok := f.raw["replay_endpoint"]; ok && string(raw) != "null" {
		if err := checkEndpoint(replay); err != nil {
			return http.StatusBadRequest, refusal("invalid replay endpoint `%s`: %v", replay, err)
		}
	}
	switch {
	case group == "": // a lookup takes no cluster for all of them
		return http.StatusBadRequest, refusal("routing_group: empty; leave it out for %s", defaultGroup)
	case model == "":
		return http.StatusBadRequest, refusal("model_name: empty")
	case blockSize == 0:
		return http.StatusBadRequest, refusal("block_size: 0; want the engine's tokens a block")
	case s.follow == nil:
		return http.StatusServiceUnavailable, answer{"error": noSubscriber}
	}
	p := partition{model, group}
	e := Engine{
		Source: event.Source{
			Cluster: group, Model: model, Instance: strconv.FormatUint(instance, 10), Rank: rank, Origin: event.Engine,
		},
		Endpoint: endpoint, Replay: replay,
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.enter(instance, p, blockSize, e); err != nil {
		return http.StatusConflict, answer{"error": err.Error()}
	}
	s.log.Info("engine registered", "source", e.Source, "endpoint", endpoint)
	return http.StatusCreated, done
}

// enter checks an engine against what is registered, in Dynamo's order and words, and follows it. The caller holds the lock.
func (s *Service) enter(instance uint64, p partition, blockSize uint32, e Engine) error {
	w := s.workers[instance]
	if w != nil && w.partition != p {
		return fmt.Errorf("instance %d is already registered for %v", instance, w.partition)
	}
	if w != nil {
		if _, ok := w.ranks[e.Source.Rank]; ok {
			return fmt.Errorf("instance %d dp_rank %d already registered", instance, e.Source.Rank)
		}
	}
	for _, other := range s.workers {
		if other.partition == p && other.blockSize != blockSize {
			return fmt.Errorf("block_size mismatch for %v: existing=%d, requested=%d", p, other.blockSize, blockSize)
		}
	}
	if err := s.follow.Follow(e); errors.Is(err, ErrFollowed) {
		return fmt.Errorf("instance %d dp_rank %d already registered", instance, e.Source.Rank)
	} else if err != nil {
		return err
	}
	if w == nil {
		w = &worker{partition: p, blockSize: blockSize, ranks: make(map[uint32]Engine)}
		s.workers[instance] = w
	}
	w.ranks[e.Source.Rank] = e
	return nil
}

// checkEndpoint reports what is no address of a ZeroMQ socket that can be connected to, in Dynamo's words where it has some.
func checkEndpoint(text string) error {
	invalid := func(format string, args ...any) error {
		return fmt.Errorf("invalid ZMQ endpoint `%s`: %s", text, fmt.Sprintf(format, args...))
	}
	scheme, rest, ok := strings.Cut(text, "://")
	switch {
	case !ok:
		return invalid("missing scheme")
	case scheme != "tcp":
		return invalid("unsupported scheme `%s`", scheme)
	}
	i := strings.LastIndex(rest, ":")
	if i < 0 {
		return invalid("missing TCP port")
	}
	if n, err := strconv.ParseUint(rest[i+1:], 10, 16); errors.Is(err, strconv.ErrRange) {
		return invalid("invalid TCP port: number too large to fit in target type")
	} else if err != nil {
		return invalid("invalid TCP port: invalid digit found in string")
	} else if host := rest[:i]; n == 0 || host == "" || host == "*" || host == "0.0.0.0" || host == "[::]" {
		return invalid("it is where an engine listens, not where it is reached")
	}
	if u, err := url.Parse(text); err != nil || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
		return invalid("want tcp://host:port")
	}
	return nil
}

func (s *Service) unregister(ctx context.Context, f *fields) (int, any) {
	var (
		instance             uint64
		model, group, former string
		rank                 uint32
	)
	f.required("instance_id", &instance)
	f.required("model_name", &model)
	f.nullable("routing_group", &group)
	f.nullable("tenant_id", &former)
	f.nullable("dp_rank", &rank)
	if f.err != nil {
		return 0, nil
	}
	given := func(name string) bool { raw, ok := f.raw[name]; return ok && string(raw) != "null" }
	leaving, err := s.leave(instance, model, group, given("routing_group"), rank, given("dp_rank"))
	if err != nil {
		return http.StatusNotFound, answer{"error": err.Error()}
	}
	for _, e := range leaving {
		if err := s.follow.Unfollow(ctx, e.Source); err != nil && !errors.Is(err, ErrNotFollowed) {
			s.log.Warn("an engine that was unregistered is not withdrawn yet", "source", e.Source, "err", err)
		}
	}
	return http.StatusOK, done
}

// leave takes ranks of an instance off the list, in Dynamo's order and words. Without a group all ranks leave, whatever rank is
// named: Dynamo does so.
func (s *Service) leave(instance uint64, model, group string, byGroup bool, rank uint32, byRank bool) (leaving []Engine, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[instance]
	switch {
	case w == nil:
		return nil, fmt.Errorf("instance %d not found", instance)
	case w.partition.model != model || byGroup && w.partition.group != group:
		return nil, fmt.Errorf("instance %d is registered for %v", instance, w.partition)
	case byGroup && byRank:
		e, ok := w.ranks[rank]
		if !ok {
			return nil, fmt.Errorf("instance %d dp_rank %d not found", instance, rank)
		}
		leaving = append(leaving, e)
		delete(w.ranks, rank)
	default:
		leaving = slices.Collect(maps.Values(w.ranks))
		clear(w.ranks)
	}
	if len(w.ranks) == 0 {
		delete(s.workers, instance)
	}
	return leaving, nil
}

// workerInfo is an instance as GET /workers has it.
type workerInfo struct {
	Instance  uint64                  `json:"instance_id"`
	Source    string                  `json:"source"` // zmq
	Status    string                  `json:"status"`
	Model     string                  `json:"model_name"`
	Group     string                  `json:"routing_group"`
	BlockSize uint32                  `json:"block_size"`
	Endpoints map[uint32]string       `json:"endpoints"`
	Listeners map[uint32]listenerInfo `json:"listeners"`
}

type listenerInfo struct {
	Endpoint string `json:"endpoint"`
	Status   string `json:"status"` // pending, active, failed
	Error    string `json:"last_error,omitempty"`
}

// listWorkers lists what is registered, by instance.
func (s *Service) listWorkers(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	for name, values := range query {
		if len(values) > 1 && slices.Contains([]string{"model_name", "routing_group", "tenant_id"}, name) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprintf(w, "Failed to deserialize query string: duplicate field `%s`", name)
			return
		}
	}
	s.mu.Lock()
	all := []workerInfo{}
	for instance, o := range s.workers {
		if query.Has("model_name") && query.Get("model_name") != o.partition.model ||
			query.Has("routing_group") && query.Get("routing_group") != o.partition.group {
			continue
		}
		all = append(all, s.info(instance, o))
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b workerInfo) int { return cmp.Compare(a.Instance, b.Instance) })
	writeJSON(w, http.StatusOK, all)
}

// info describes an instance. One of its ranks that failed makes it failed, else one that is pending makes it pending.
func (s *Service) info(instance uint64, w *worker) workerInfo {
	i := workerInfo{
		Instance: instance, Source: "zmq", Status: "active", Model: w.partition.model, Group: w.partition.group, BlockSize: w.blockSize,
		Endpoints: make(map[uint32]string), Listeners: make(map[uint32]listenerInfo),
	}
	for rank, e := range w.ranks {
		l := listenerInfo{Endpoint: e.Endpoint, Status: "active"}
		switch st := s.follow.Heard(e.Source); {
		case st == nil:
			l.Status = "pending"
		case st.State == event.StateGone || st.State == event.StateStale:
			l.Status, l.Error = "failed", st.Reason
		}
		i.Endpoints[rank], i.Listeners[rank] = e.Endpoint, l
		if l.Status == "failed" || l.Status == "pending" && i.Status == "active" {
			i.Status = l.Status
		}
	}
	return i
}
