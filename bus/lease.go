package bus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"kvstrata/event"
)

// ErrLeaseLost says that another holder may have the source: stop judging it.
var ErrLeaseLost = errors.New("lease lost")

// Lease is the right to publish one source. Its Fence marks everything published under it.
type Lease struct {
	Fence event.Fence

	bus      *Bus
	source   event.Source
	key      string
	value    []byte
	revision uint64
}

type leaseValue struct {
	Holder string      `json:"holder"`
	Fence  event.Fence `json:"fence"`
}

// leaseKey spells a source within the alphabet of NATS keys, which has '=' but not '%'.
func leaseKey(source event.Source) string { return strings.ReplaceAll(source.Tokens(), "%", "=") }

// Acquire waits until the source is free and takes it. The new fence is max(last known + 1, Unix milliseconds), where
// the last known stands in the bucket or in the source's newest status, so that it grows even when the bucket is lost. A
// holder whose lease was lost with the bucket gets as long as a lease lasts to take it again: it need not begin anew.
func (b *Bus) Acquire(ctx context.Context, source event.Source, holder string) (*Lease, error) {
	l := &Lease{bus: b, source: source, key: leaseKey(source)}
	last, err := b.lastFence(ctx, source)
	if err != nil {
		return nil, fmt.Errorf("acquire lease of %v: %w", source, err)
	}
	tick := time.NewTicker(b.cfg.LeaseTTL / 5)
	defer tick.Stop()
	said := ""
	var bucket time.Time // when the bucket was made in which the holder was seen
	var leave time.Time  // until then a holder may come back
	for {
		entry, err := b.leases.Get(ctx, l.key)
		switch {
		case err == nil:
			bucket = b.leaseBucketMade(ctx)
			var held leaseValue
			if json.Unmarshal(entry.Value(), &held) == nil {
				last = max(last, held.Fence)
				if said != held.Holder {
					said = held.Holder
					b.log.Info("source is held by another subscriber; waiting", "source", source, "holder", held.Holder)
				}
			}
		case said != "" && leave.IsZero() && !b.leaseBucketMade(ctx).Equal(bucket):
			leave = time.Now().Add(b.cfg.LeaseTTL)
		}
		if time.Now().Before(leave) {
			if err := wait(ctx, tick); err != nil {
				return nil, fmt.Errorf("acquire lease of %v: %w", source, err)
			}
			continue
		}
		l.Fence = max(last+1, event.Fence(time.Now().UnixMilli()))
		value, err := json.Marshal(leaseValue{Holder: holder, Fence: l.Fence})
		if err != nil {
			return nil, err
		}
		l.value = value
		l.revision, err = b.leases.Create(ctx, l.key, value)
		if err == nil {
			return l, nil
		}
		if !errors.Is(err, jetstream.ErrKeyExists) && ctx.Err() == nil {
			b.log.Warn("lease bucket does not answer; trying again", "source", source, "err", err)
		}
		if err := wait(ctx, tick); err != nil {
			return nil, fmt.Errorf("acquire lease of %v: %w", source, err)
		}
	}
}

func wait(ctx context.Context, tick *time.Ticker) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-tick.C:
		return nil
	}
}

// leaseBucketMade returns when the bucket was made; the zero time while that can't be told.
func (b *Bus) leaseBucketMade(ctx context.Context) time.Time {
	status, err := b.leases.Status(ctx)
	if err != nil {
		return time.Time{}
	}
	if s, ok := status.(*jetstream.KeyValueBucketStatus); ok {
		return s.StreamInfo().Created
	}
	return time.Time{}
}

// Keep renews the lease until ctx ends, and returns nil then, or ErrLeaseLost once another has the source. While NATS
// can't be reached the lease is kept: nothing can be published meanwhile, and should another have taken the source on
// the far side of a partition, its higher fence makes consumers drop what this one sends.
func (l *Lease) Keep(ctx context.Context) error {
	period := l.bus.cfg.LeaseTTL / 4
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		attempt, cancel := context.WithTimeout(ctx, period)
		err := l.renew(attempt)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrLeaseLost) {
			return fmt.Errorf("renew lease of %v: %w", l.source, err)
		}
	}
}

func (l *Lease) renew(ctx context.Context) error {
	revision, err := l.bus.leases.Update(ctx, l.key, l.value, l.revision)
	var refused *jetstream.APIError
	if errors.As(err, &refused) && refused.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
		return l.retake(ctx)
	}
	if err != nil {
		return err
	}
	l.revision = revision
	return nil
}

// retake takes a lease again that expired, as it does when NATS was away for long, unless another has judged since: a
// new holder begins with a status message of its fence.
func (l *Lease) retake(ctx context.Context) error {
	fence, err := l.bus.lastFence(ctx, l.source)
	if err != nil {
		return err
	}
	if fence > l.Fence {
		return fmt.Errorf("%w: a holder with fence %d came after %d", ErrLeaseLost, fence, l.Fence)
	}
	revision, err := l.bus.leases.Create(ctx, l.key, l.value)
	if errors.Is(err, jetstream.ErrKeyExists) {
		// It may be ours: a renewal that was stored, but whose answer came too late.
		entry, err := l.bus.leases.Get(ctx, l.key)
		if err == nil && bytes.Equal(entry.Value(), l.value) {
			l.revision = entry.Revision()
			return nil
		}
		return errors.Join(fmt.Errorf("%w: another holds it", ErrLeaseLost), err)
	}
	if err != nil {
		return err
	}
	l.revision = revision
	return nil
}

// lastFence returns the fence of the newest status message of a source, 0 when there is none.
func (b *Bus) lastFence(ctx context.Context, source event.Source) (event.Fence, error) {
	stream, err := b.js.Stream(ctx, EventStream)
	if err != nil {
		return 0, fmt.Errorf("look up stream %s: %w", EventStream, err)
	}
	msg, err := stream.GetLastMsgForSubject(ctx, Subject(Status, source))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read last status of %v: %w", source, err)
	}
	status, err := event.UnmarshalStatus(msg.Data, source)
	return status.Fence, err
}

// Release gives the source up at once, so that the next holder need not wait.
func (l *Lease) Release(ctx context.Context) error {
	err := l.bus.leases.Delete(ctx, l.key, jetstream.LastRevision(l.revision))
	if err == nil {
		return nil
	}
	// The last renewal may have been stored though whoever stopped it did not wait for the answer.
	if entry, gone := l.bus.leases.Get(ctx, l.key); gone == nil && bytes.Equal(entry.Value(), l.value) {
		err = l.bus.leases.Delete(ctx, l.key, jetstream.LastRevision(entry.Revision()))
	}
	if err != nil {
		return fmt.Errorf("release lease %s: %w", l.key, err)
	}
	return nil
}
