package main

import (
	"context"
	"errors"
	"net"

	"kvstrata/event"
	"kvstrata/indexer/prefix/kvindexer"
	"kvstrata/server"
	"kvstrata/subscriber"
)

// kvIndexerFlag opens the standalone KV indexer's API.
type kvIndexerFlag struct {
	KVIndexer string `name:"kv-indexer" help:"Address of the standalone KV indexer's API (Dynamo's, of Mooncake's RFC 1403), over which engines are registered too; needs the role prefix. Empty: it is not served." placeholder:"HOST:PORT" env:"KVSTRATA_KV_INDEXER"`
}

// entrances is the listener, with the tokens of the others.
func (f kvIndexerFlag) entrances(others listenFlags) []entrance {
	if f.KVIndexer == "" {
		return nil
	}
	return []entrance{{"--kv-indexer", f.KVIndexer, others.config().Guarded(), "--token-file"}}
}

// addKVIndexer binds the API's listener.
func (s *stack) addKVIndexer(flag kvIndexerFlag, others listenFlags, hashKey string) error {
	if _, _, err := net.SplitHostPort(flag.KVIndexer); err != nil {
		return usagef("--kv-indexer %q: want host:port, as 127.0.0.1:8090", flag.KVIndexer)
	}
	if s.index == nil {
		return usagef("--kv-indexer: there is no index to ask; add prefix to --roles")
	}
	var follow kvindexer.Follower
	if s.sub != nil {
		follow = follower{s.sub}
	}
	service := kvindexer.New(kvindexer.Config{Keyed: hashKey != ""}, s.index, follow, s.app.log)
	srv, err := server.NewKVIndexer(others.config(), flag.KVIndexer, service.Handler(), s.app.log)
	if err != nil {
		return err
	}
	s.kvIndexer = srv
	s.runs = append(s.runs, srv.Run)
	return nil
}

// follower is the subscriber as the KV indexer's API sees it.
type follower struct{ sub *subscriber.Subscriber }

// Follow begins to hear an engine.
func (f follower) Follow(e kvindexer.Engine) error {
	err := f.sub.Add(subscriber.EngineConfig{Source: e.Source, Endpoint: e.Endpoint, Replay: e.Replay})
	if errors.Is(err, subscriber.ErrFollowed) {
		return kvindexer.ErrFollowed
	}
	return err
}

// Unfollow ends that.
func (f follower) Unfollow(ctx context.Context, source event.Source) error {
	err := f.sub.Remove(ctx, source)
	if errors.Is(err, subscriber.ErrNotFollowed) {
		return kvindexer.ErrNotFollowed
	}
	return err
}

// Heard returns the last that was told of an engine.
func (f follower) Heard(source event.Source) *event.Status {
	st, _ := f.sub.Followed(source)
	return st
}
