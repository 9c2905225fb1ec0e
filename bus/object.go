package bus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// objectReader reads an object of the object store, and fails at its end when the bytes are not those that were put.
//
// It stands in for nats.go's Get (v1.55.0), which allows 5 s for a whole object and, where its context ends while an
// object is under way, leaves goroutines behind or keeps its reader waiting.
type objectReader struct {
	ctx      context.Context
	info     *jetstream.ObjectInfo
	messages jetstream.MessagesContext
	remove   func() // the consumer: it would stay for a while
	chunk    []byte // what is left of the last one
	left     uint64 // bytes still to come, chunk included
	sum      hash.Hash
}

// chunkTimeout is how long the next chunk may take: an object may be deleted while it is read.
const chunkTimeout = 5 * time.Second

// openObject begins to read an object; reading ends with ctx. The caller closes the reader.
func (b *Bus) openObject(ctx context.Context, bucket, name string) (*objectReader, error) {
	info, err := b.checkpoints.GetInfo(ctx, name)
	if err != nil {
		return nil, err
	}
	consumer, err := b.js.CreateConsumer(ctx, "OBJ_"+bucket, jetstream.ConsumerConfig{
		FilterSubject: "$O." + bucket + ".C." + info.NUID, AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true,
		Replicas: 1, InactiveThreshold: 30 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(16), jetstream.PullHeartbeat(time.Second), jetstream.PullExpiry(10*time.Second))
	if err != nil {
		return nil, err
	}
	remove := func() {
		gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := b.js.DeleteConsumer(gone, "OBJ_"+bucket, consumer.CachedInfo().Name); err != nil {
			b.log.Debug("a consumer stays until it is idle for long", "bucket", bucket, "err", err)
		}
	}
	return &objectReader{ctx: ctx, info: info, messages: messages, remove: remove, left: info.Size, sum: sha256.New()}, nil
}

func (r *objectReader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	if len(r.chunk) == 0 {
		ctx, cancel := context.WithTimeout(r.ctx, chunkTimeout)
		msg, err := r.messages.Next(jetstream.NextContext(ctx))
		cancel()
		if err != nil {
			return 0, fmt.Errorf("wait for the next chunk: %w", err)
		}
		r.chunk = msg.Data()
		r.sum.Write(r.chunk)
	}
	n := copy(p, r.chunk)
	if r.chunk = r.chunk[n:]; uint64(n) > r.left {
		return 0, errors.New("the object is longer than its description says")
	}
	r.left -= uint64(n)
	if r.left == 0 {
		return n, r.check()
	}
	return n, nil
}

// check compares the digest of everything read with the one that the object was put with.
func (r *objectReader) check() error {
	text, _ := strings.CutPrefix(r.info.Digest, "SHA-256=")
	want, err := base64.URLEncoding.DecodeString(text)
	if err != nil {
		return fmt.Errorf("object digest %q: %w", r.info.Digest, err)
	}
	if !bytes.Equal(want, r.sum.Sum(nil)) {
		return errors.New("the object's bytes are not those that were put")
	}
	return nil
}

// Close ends the reading.
func (r *objectReader) Close() {
	r.messages.Stop()
	r.remove()
}
