package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// fleetView is what the demo asks of an index, in this process or in another.
type fleetView interface {
	// url is where the API is.
	url(ctx context.Context) string
	// applied is how many batches of a source lookups see.
	applied(source event.Source) uint64
	// sources lists every source.
	sources(ctx context.Context) ([]prefix.SourceInfo, error)
	// resident yields a source's resident blocks.
	resident(ctx context.Context, source event.Source, yield func(key blockKey, copies int)) error
}

// blockKey is what a resident set counts copies of.
type blockKey struct {
	hash  event.BlockHash
	tier  event.Tier
	group uint32
}

// localView is of the index in this process.
type localView struct{ stack *stack }

func (v localView) url(context.Context) string { return v.stack.server.URL() }

func (v localView) applied(source event.Source) uint64 {
	_, seq, started := v.stack.index.Seq(source)
	if !started {
		return 0
	}
	return uint64(seq) + 1
}

func (v localView) sources(context.Context) ([]prefix.SourceInfo, error) {
	return v.stack.index.Sources(), nil
}

func (v localView) resident(_ context.Context, source event.Source, yield func(blockKey, int)) error {
	for e := range v.stack.index.Resident(source) {
		yield(blockKey{e.Hash, e.Tier, e.Group.Index()}, int(e.Copies))
	}
	return nil
}

// remoteView asks the API of the processes with an index. What it knows of applied batches is some milliseconds old.
type remoteView struct {
	supervisor *supervisor
	client     *http.Client

	mu    sync.Mutex
	asked time.Time
	known map[event.Source]uint64
}

func newRemoteView(s *supervisor, client *http.Client) *remoteView {
	return &remoteView{supervisor: s, client: client, known: make(map[event.Source]uint64)}
}

func (v *remoteView) url(ctx context.Context) string { return v.supervisor.url(ctx, "web") }

// viewAge is how old an answer of applied may be.
const viewAge = 20 * time.Millisecond

func (v *remoteView) applied(source event.Source) uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	if time.Since(v.asked) > viewAge {
		v.asked = time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		infos, err := v.sources(ctx)
		if err == nil { // an index that is being started again answers soon
			for _, info := range infos {
				if info.Started {
					v.known[info.Source] = uint64(info.LastSeq) + 1
				}
			}
		}
	}
	return v.known[source]
}

func (v *remoteView) get(ctx context.Context, path string, read func(*http.Response) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, v.supervisor.url(ctx, "prefix")+path, nil)
	if err != nil {
		return err
	}
	resp, err := v.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", path, resp.Status)
	}
	return read(resp)
}

func (v *remoteView) sources(ctx context.Context) ([]prefix.SourceInfo, error) {
	var answer struct{ Sources []prefix.SourceInfo }
	err := v.get(ctx, "/v1/sources", func(resp *http.Response) error { return json.NewDecoder(resp.Body).Decode(&answer) })
	return answer.Sources, err
}

func (v *remoteView) resident(ctx context.Context, source event.Source, yield func(blockKey, int)) error {
	return v.get(ctx, "/v1/resident?source="+url.QueryEscape(source.Tokens()), func(resp *http.Response) error {
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			var b struct {
				Hash   event.BlockHash
				Tier   event.Tier
				Group  event.Group
				Copies int
			}
			if err := json.Unmarshal(lines.Bytes(), &b); err != nil {
				return fmt.Errorf("read /v1/resident: %w", err)
			}
			yield(blockKey{b.Hash, b.Tier, b.Group.Index()}, b.Copies)
		}
		return lines.Err()
	})
}
