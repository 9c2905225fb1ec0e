package event

import (
	"encoding/json"
	"io"
	"time"
)

// Line is one event as a JSON line for people: what `kvstrata tail --json` prints. It holds no tokens, keys or salts.
type Line struct {
	Time      string      `json:"time,omitempty"` // engine's clock, RFC 3339 with nanoseconds
	Received  string      `json:"received,omitempty"`
	Source    string      `json:"source"` // as subject tokens
	Epoch     Epoch       `json:"epoch"`
	Seq       Seq         `json:"seq"`
	LastSeq   Seq         `json:"last_seq,omitempty"` // of a range
	Way       Way         `json:"way"`
	Reason    string      `json:"reason,omitempty"`
	Kind      Kind        `json:"kind,omitempty"`
	Cause     ClearCause  `json:"cause,omitempty"`
	Tier      Tier        `json:"tier,omitempty"`
	Group     *Group      `json:"group,omitempty"`
	Spec      SpecKind    `json:"spec_kind,omitempty"`
	Window    uint32      `json:"sliding_window,omitempty"`
	Parent    *BlockHash  `json:"parent,omitempty"`
	Seed      uint64      `json:"seed,omitempty,string"`
	BlockSize uint32      `json:"block_size,omitempty"`
	Eagle     bool        `json:"eagle,omitempty"`
	Unrooted  bool        `json:"unrooted,omitempty"`
	LoRA      string      `json:"lora_name,omitempty"`
	LoRAID    *int64      `json:"lora_id,omitempty"`
	Session   string      `json:"session_id,omitempty"`
	Locality  Locality    `json:"locality,omitempty"`
	Ownership string      `json:"ownership,omitempty"`
	Load      *LineLoad   `json:"load,omitempty"`
	Blocks    []LineBlock `json:"blocks,omitempty"`
}

// LineLoad is a LOADED's transfer.
type LineLoad struct {
	From     Tier    `json:"from"`
	Peer     string  `json:"peer,omitempty"`
	Request  string  `json:"request,omitempty"`
	Bytes    uint64  `json:"bytes"`
	Duration float64 `json:"duration_s"`
}

// LineBlock is one block of an event.
type LineBlock struct {
	Hash   BlockHash   `json:"hash"`
	Prefix *PrefixHash `json:"prefix,omitempty"`
	Effect int8        `json:"effect"`
	Copies *int32      `json:"copies_left,omitempty"`
	Age    *float64    `json:"age_s,omitempty"`
}

// Lines returns a message's events one by one; a batch without events gives one line without a kind.
func (m *Message) Lines() []Line {
	var lines []Line
	for i := range m.Batches {
		b := &m.Batches[i]
		head := Line{
			Source: m.Source.Tokens(), Epoch: m.Epoch, Seq: b.First, Way: b.Way, Reason: b.Reason,
			Time: stamp(b.Time), Received: stamp(b.Received),
		}
		if b.Last != b.First {
			head.LastSeq = b.Last
		}
		if len(b.Events) == 0 {
			lines = append(lines, head)
		}
		for j := range b.Events {
			lines = append(lines, head.with(&b.Events[j]))
		}
	}
	return lines
}

func (l Line) with(ev *Event) Line {
	l.Kind, l.Cause, l.Tier, l.Spec, l.Window = ev.Kind, ev.Cause, ev.Tier, ev.Spec, ev.Window
	l.Seed, l.BlockSize, l.Eagle, l.Unrooted = ev.Seed, ev.BlockSize, ev.Eagle, ev.Unrooted
	l.LoRA, l.Session, l.Locality, l.Ownership = ev.LoRA, ev.Session, ev.Locality, ev.Ownership
	if ev.Group != NoGroup && ev.Kind != Cleared {
		l.Group = &ev.Group
	}
	if ev.HasParent {
		l.Parent = &ev.Parent
	}
	if ev.LoRAID != NoLoRAID {
		l.LoRAID = &ev.LoRAID
	}
	if ev.Kind == Loaded {
		l.Load = &LineLoad{
			From: ev.Load.From, Peer: ev.Load.Peer, Request: ev.Load.Request, Bytes: ev.Load.Bytes,
			Duration: ev.Load.Duration.Seconds(),
		}
	}
	for i := range ev.Blocks {
		b := &ev.Blocks[i]
		line := LineBlock{Hash: b.Hash, Effect: b.Effect}
		if b.Prefix != 0 && !ev.Unrooted {
			line.Prefix = &b.Prefix
		}
		if ev.Kind == Evicted && b.Copies >= 0 {
			line.Copies = &b.Copies
		}
		if ev.Kind == Evicted && b.Age >= 0 {
			age := b.Age.Seconds()
			line.Age = &age
		}
		l.Blocks = append(l.Blocks, line)
	}
	return l
}

func stamp(t Time) string {
	if t == 0 {
		return ""
	}
	return t.Std().UTC().Format(time.RFC3339Nano)
}

// WriteLines writes a message's events to w, one JSON object a line.
func (m *Message) WriteLines(w io.Writer) error {
	enc := json.NewEncoder(w)
	for _, line := range m.Lines() {
		if err := enc.Encode(line); err != nil {
			return err
		}
	}
	return nil
}
