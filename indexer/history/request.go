package history

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// Told is one thing that a connector told of a request.
type Told struct {
	Time      int64   `json:"time"`
	ID        string  `json:"id"`
	Instance  string  `json:"instance"`
	Kind      string  `json:"kind"` // loaded, saved, failed or lease_expired
	Transport string  `json:"transport,omitempty"`
	Peer      string  `json:"peer,omitempty"`
	From      string  `json:"from,omitempty"`
	To        string  `json:"to,omitempty"`
	Blocks    uint64  `json:"blocks"`
	Bytes     uint64  `json:"bytes"`
	Duration  float64 `json:"duration"` // in seconds
	Reason    string  `json:"reason,omitempty"`
}

// toldShown bounds what is told of a request.
const toldShown = 1000

// ofRequest reads what connectors told of a request, and returns the blocks of its first load as a prompt, asked about when that began; nil
// where no load of it is known by its blocks.
func (w *walking) ofRequest(ctx context.Context, out *Walk) (*Prompt, error) {
	p := w.prompt
	bound := clickhouse.Parameters{
		"request": boundText.Replace(p.Request), "model": boundText.Replace(p.Model), "engine": boundText.Replace(p.Engine),
	}
	type load struct {
		at             time.Time
		source         string
		epoch, seq, ev uint64
		duration       time.Duration
	}
	var first *load
	err := w.reader.query(ctx, `SELECT committed, toString(source), toString(from_tier), toString(tier), toString(peer), toUInt64(blocks), bytes, duration_us,
  epoch, seq, toUInt64(ev) FROM loads WHERE request = {request:String} AND `+ofSources+` ORDER BY committed, source, epoch, seq, ev LIMIT `+fmt.Sprint(toldShown),
		bound, func(scan func(...any) error) error {
			var t Told
			var l load
			var took uint64
			if err := scan(&l.at, &l.source, &t.From, &t.To, &t.Peer, &t.Blocks, &t.Bytes, &took, &l.epoch, &l.seq, &l.ev); err != nil {
				return err
			}
			l.duration = time.Duration(took) * time.Microsecond
			if first == nil {
				first = &l
			}
			t.Kind = event.TransferLoaded.String()
			return out.tell(t, l.at, l.source, l.duration)
		})
	if err != nil {
		return nil, err
	}
	// Loads are told twice: in order, with their blocks, and as records.
	err = w.reader.query(ctx, `SELECT committed, toString(source), toString(kind), toString(transport), toString(peer), toString(from_tier), toString(to_tier),
  toUInt64(blocks), bytes, duration_us, reason FROM transfers
WHERE request = {request:String} AND `+ofSources+` ORDER BY committed, source, stream_seq, rec LIMIT `+fmt.Sprint(toldShown),
		bound, func(scan func(...any) error) error {
			var t Told
			var at time.Time
			var source string
			var took uint64
			if err := scan(&at, &source, &t.Kind, &t.Transport, &t.Peer, &t.From, &t.To, &t.Blocks, &t.Bytes, &took, &t.Reason); err != nil {
				return err
			}
			if first != nil && t.Kind == event.TransferLoaded.String() {
				return nil
			}
			return out.tell(t, at, source, time.Duration(took)*time.Microsecond)
		})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(out.Told, func(a, b Told) int { return int(a.Time - b.Time) })
	for i := range out.Told {
		out.Summary = append(out.Summary, out.Told[i].sentence())
	}
	if first == nil {
		if len(out.Told) == 0 {
			out.Summary = append(out.Summary, "No connector told of this request in what is kept.")
		}
		out.Notes = append(out.Notes, "which blocks the request was about is not known: no load of it was told block by block")
		return nil, nil
	}
	hashes, err := w.reader.loadedHashes(ctx, first.at, first.source, first.epoch, first.seq, first.ev)
	if err != nil {
		return nil, err
	}
	if len(hashes) == 0 {
		out.Notes = append(out.Notes, "the blocks that the request loaded have no prefix hashes")
		return nil, nil
	}
	source, err := event.ParseSource(first.source)
	if err != nil {
		return nil, err
	}
	out.Model, w.at = source.Model, first.at.Add(-first.duration)
	out.Notes = append(out.Notes, "the blocks are those of the request's first load, in order, at the moment when it began; they may begin in the middle of the prompt")
	return &Prompt{Model: source.Model, Engine: source.Instance, Hashes: hashes, Tier: p.Tier}, nil
}

// tell adds what was told.
func (w *Walk) tell(t Told, at time.Time, source string, took time.Duration) error {
	name, err := event.ParseSource(source)
	t.Time, t.ID, t.Instance, t.Duration = at.UnixMilli(), source, name.Instance, took.Seconds()
	w.Told = append(w.Told, t)
	return err
}

// sentence tells it to people.
func (t *Told) sentence() string {
	blocks := plural(int(t.Blocks), "block")
	by := ""
	if t.Transport != "" {
		by = " by " + t.Transport
	}
	took := time.Duration(t.Duration * float64(time.Second)).Round(time.Microsecond)
	switch t.Kind {
	case event.TransferFailed.String():
		reason := t.Reason
		if reason == "" {
			reason = "without a reason"
		}
		return fmt.Sprintf("%s did not move %s from %s to %s%s (%s): %s.", t.Instance, blocks, orNone(t.From), orNone(t.To), by, orNone(t.Peer), reason)
	case event.LeaseExpired.String():
		return fmt.Sprintf("A lease on %s expired: nobody fetched its blocks in time.", t.Instance)
	}
	return fmt.Sprintf("%s %s %s (%s) from %s to %s%s in %v; peer %s.", t.Instance, t.Kind, blocks, byteSize(t.Bytes), orNone(t.From), orNone(t.To), by, took,
		orNone(t.Peer))
}

func orNone(text string) string {
	if text == "" {
		return "not told"
	}
	return text
}

// loadedHashes are the prefix hashes of what one LOADED brought, up to the first block without one.
func (r *Reader) loadedHashes(ctx context.Context, at time.Time, source string, epoch, seq, ev uint64) (hashes []event.PrefixHash, err error) {
	whole := true
	err = r.query(ctx, `SELECT hash, named FROM block_events
WHERE committed = toDateTime({at:Int64}, 'UTC') AND op = 'LOADED' AND source = {source:String} AND epoch = {epoch:UInt64} AND seq = {seq:UInt64}
  AND ev = {ev:UInt64} ORDER BY pos LIMIT `+fmt.Sprint(maxPromptHashes), clickhouse.Parameters{
		"at": strconv.FormatInt(at.Unix(), 10), "source": source, "epoch": strconv.FormatUint(epoch, 10), "seq": strconv.FormatUint(seq, 10),
		"ev": strconv.FormatUint(ev, 10),
	}, func(scan func(...any) error) error {
		var hash uint64
		var named uint8
		if err := scan(&hash, &named); err != nil {
			return err
		}
		if whole = whole && named != 0; whole {
			hashes = append(hashes, event.PrefixHash(hash))
		}
		return nil
	})
	return hashes, err
}
