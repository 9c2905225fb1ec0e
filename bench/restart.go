package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
)

// restartBlocks lie in the checkpoints of restartSources.
const (
	restartBlocks  = 1_000_000
	restartSources = 16
)

// restart returns the seconds from checkpoint objects that lie in memory to an index that answers from all of them.
func restart() (float64, error) {
	objects := make([][]byte, restartSources)
	for s := range objects {
		object, err := checkpoint(s, restartBlocks/restartSources)
		if err != nil {
			return 0, err
		}
		objects[s] = object
	}
	runtime.GC()
	began := time.Now()
	x := newIndex(restartSources)
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for _, object := range objects {
		group.Go(func() error {
			_, err := x.Restore(context.Background(), bytes.NewReader(object))
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	took := time.Since(began).Seconds()
	var blocks uint64
	for _, s := range x.Sources() {
		for _, t := range s.Resident {
			blocks += t.Blocks
		}
	}
	if want := uint64(restartBlocks / restartSources * restartSources); blocks != want {
		return 0, fmt.Errorf("%d blocks after restart, want %d", blocks, want)
	}
	return took, nil
}

// checkpoint returns the object of a source whose judge was told n blocks in chains of 64.
func checkpoint(worker, n int) ([]byte, error) {
	set := resident.New(resident.DefaultConfig())
	f := newFeeder(nil, worker+1)
	f.random.Next()
	var ledger event.Ledger
	for seq := event.Seq(0); n > 0; seq++ {
		length := min(n, fillRun)
		ev := storedRun(make([]event.Block, length))
		ev.Tokens = make([]uint32, length*blockSize)
		for i := range ev.Blocks {
			ev.Blocks[i] = event.Block{Hash: event.IntHash(f.random.Next() ^ uint64(worker)<<48), Copies: -1, Age: -1}
		}
		for i := range ev.Tokens {
			ev.Tokens[i] = uint32(worker)<<20 + f.random.Token()
		}
		b := event.Batch{First: seq, Last: seq, Way: event.Live, Rank: -1, Time: event.Time(seq+1) * 1e6, Events: []event.Event{ev}}
		set.Judge(&b)
		ledger.Count(&b)
		n -= length
	}
	snap := set.Snapshot()
	defer snap.Release()
	cp := &event.Checkpoint{
		Source: engine(worker), Epoch: 1, Fence: 1, Seq: ledger.Last, State: event.StateLive, Digest: snap.Digest, Ledger: ledger.Clone(),
		Groups: snap.Groups, Entries: snap.Len, Fullest: snap.Fullest,
	}
	var object bytes.Buffer
	err := event.WriteCheckpoint(&object, cp, snap.Entries())
	return object.Bytes(), err
}

// visible returns the p99 and the median in ms from when a batch of 64 blocks is handed to the index until a reader on another
// core has found its last block, while other batches are applied at half the ceiling.
func visible(batches int) (p50, p99 float64, err error) {
	const workers = 16
	x := newIndex(workers + 1)
	f := newFeeder(x, workers+1)
	ceiling, err := f.ceiling(workers, time.Second)
	if err != nil {
		return 0, 0, err
	}
	type handed struct {
		at    time.Time
		names []event.PrefixHash
	}
	hand, found := make(chan handed), make(chan time.Duration)
	done := make(chan error, 1)
	go func() {
		defer close(found)
		r, failed := x.NewReader(), error(nil)
		for h := range hand {
			for failed == nil {
				scores, err := r.Scores(&prefix.Request{Model: model, BlockSize: blockSize, Hashes: h.names})
				failed = err
				if len(scores) == 1 && int(scores[0].Blocks) == len(h.names) {
					break
				}
			}
			found <- time.Since(h.at)
		}
		done <- failed
	}()
	took := make([]uint32, 0, batches)
	began, ops := time.Now(), 0
	for n := range batches {
		names := make([]event.PrefixHash, fillRun)
		for i := range names {
			names[i] = event.PrefixHash(f.random.Next())
		}
		hand <- handed{time.Now(), names}
		err = errors.Join(err, f.store(n%workers, names))
		took = append(took, clamp(<-found))
		for ops += 3 * fillRun; err == nil; { // the paced rest of the traffic
			if time.Duration(float64(ops)/(ceiling/2)*1e9) > time.Since(began) {
				break
			}
			var more int
			more, err = f.churn(workers, churnKept)
			ops += more
		}
	}
	close(hand)
	for range found {
	}
	return micros(took, 0.5) / 1000, micros(took, 0.99) / 1000, errors.Join(err, <-done)
}
