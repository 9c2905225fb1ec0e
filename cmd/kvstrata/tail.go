package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/publisher"
)

type tailCmd struct {
	natsLogin

	NATS      string   `name:"nats" help:"NATS servers, comma-separated." default:"nats://127.0.0.1:4222" env:"KVSTRATA_NATS"`
	Source    string   `help:"Only sources whose instance or model matches this pattern, as 'prefill-*'." placeholder:"GLOB"`
	Kind      []string `help:"Only these kinds: STORED, EVICTED, LOADED, CLEARED." placeholder:"KIND"`
	Hash      string   `help:"Only events about this block: an engine's hash or a prefix hash, in hexadecimal." placeholder:"HEX"`
	FromStart bool     `help:"From the oldest message that NATS holds, not from now."`
	JSON      bool     `name:"json" help:"One JSON object a line."`
	Dynamo    bool     `help:"Lines as Dynamo's recorder writes them. The subscriber must keep tokens (--tokens=keep) and have no --hash-key; --kind and --hash do nothing."`
	Count     int      `help:"End after so many events; 0: never." default:"0"`
}

// Help shows how it is used.
func (tailCmd) Help() string {
	return `Example:

  kvstrata tail --nats nats://127.0.0.1:4222 --source 'prefill-*' --kind EVICTED
  kvstrata tail --json --from-start | jq .kind`
}

// Run prints events until a signal comes.
func (c *tailCmd) Run(a *app) error {
	kinds := make(map[event.Kind]bool)
	for _, text := range c.Kind {
		var k event.Kind
		if err := k.UnmarshalText([]byte(strings.ToUpper(text))); err != nil {
			return usagef("--kind %q: want STORED, EVICTED, LOADED or CLEARED", text)
		}
		kinds[k] = true
	}
	if _, err := path.Match(c.Source, ""); err != nil {
		return usagef("--source %q: %w", c.Source, err)
	}
	cfg := c.client(bus.DefaultConfig())
	cfg.URL = c.NATS
	if err := cfg.Validate(); err != nil {
		return usagef("%w", err)
	}
	b, err := bus.Attach(a.ctx, cfg, "kvstrata tail", a.log)
	if a.ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer b.Close()
	from := uint64(1)
	if !c.FromStart {
		end, err := b.Position(a.ctx)
		if err != nil {
			return err
		}
		from = end.Sequence + 1
	}
	reader, err := b.Read(a.ctx, from)
	if err != nil {
		return err
	}
	defer reader.Close()
	return c.follow(a, reader, kinds)
}

func (c *tailCmd) follow(a *app, reader *bus.Reader, kinds map[event.Kind]bool) error {
	var dec event.Decoder
	enc := json.NewEncoder(a.stdout)
	recorder := publisher.NewDynamoRecorder(a.stdout)
	printed := 0
	for {
		d, err := reader.Next(a.ctx)
		if a.ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, bus.ErrStreamChanged) {
			return fmt.Errorf("%w; start tail again", err)
		}
		if err != nil {
			return err
		}
		if err := d.Ack(); err != nil {
			return err
		}
		if d.Kind != bus.Events || !c.wanted(d.Source) {
			continue
		}
		batches, err := dec.Decode(d.Data)
		if err != nil {
			a.log.Warn("message can't be decoded; skipped", "sequence", d.Sequence, "err", err)
			continue
		}
		m := event.Message{Source: d.Source, Epoch: d.Head.Epoch, Fence: d.Head.Fence, Batches: batches}
		if c.Dynamo {
			before := recorder.Unwritten
			if err := recorder.Write(&m); err != nil {
				return err
			}
			if before == 0 && recorder.Unwritten > 0 {
				a.log.Warn("blocks without tokens, with extra keys or without a name can't be written for Dynamo; for tokens, start the subscriber with --tokens=keep")
			}
			if printed = recorder.Written; c.Count > 0 && printed >= c.Count {
				return nil
			}
			continue
		}
		for _, line := range m.Lines() {
			if len(kinds) > 0 && !kinds[line.Kind] || !c.about(&line) {
				continue
			}
			if c.JSON {
				err = enc.Encode(line)
			} else {
				_, err = fmt.Fprintln(a.stdout, human(d.Source, &line))
			}
			if err != nil {
				return err
			}
			if printed++; printed == c.Count {
				return nil
			}
		}
	}
}

func (c *tailCmd) wanted(s event.Source) bool {
	if c.Source == "" {
		return true
	}
	instance, _ := path.Match(c.Source, s.Instance)
	model, _ := path.Match(c.Source, s.Model)
	return instance || model
}

func (c *tailCmd) about(line *event.Line) bool {
	if c.Hash == "" {
		return true
	}
	for _, b := range line.Blocks {
		if strings.EqualFold(b.Hash.String(), c.Hash) || b.Prefix != nil && strings.EqualFold(b.Prefix.String(), c.Hash) {
			return true
		}
	}
	return false
}

// human is one event as a line for reading.
func human(s event.Source, l *event.Line) string {
	at := l.Received
	if t, err := time.Parse(time.RFC3339Nano, l.Received); err == nil {
		at = t.Local().Format("15:04:05.000")
	}
	seq := fmt.Sprintf("#%d", l.Seq)
	if l.LastSeq > 0 {
		seq = fmt.Sprintf("#%d-%d", l.Seq, l.LastSeq)
	}
	text := fmt.Sprintf("%s %-24s %-8s", at, s, seq)
	switch l.Kind {
	case 0:
		return text + fmt.Sprintf(" %v batch without events %s", l.Way, l.Reason)
	case event.Cleared:
		return strings.TrimSpace(text + fmt.Sprintf(" CLEARED by %v %s", l.Cause, l.Reason))
	}
	text += fmt.Sprintf(" %-7v %-4s %3d blocks", l.Kind, l.Tier, len(l.Blocks))
	if len(l.Blocks) > 0 {
		text += " " + l.Blocks[0].Hash.String()
		if len(l.Blocks) > 1 {
			text += ".." + l.Blocks[len(l.Blocks)-1].Hash.String()
		}
		if b := l.Blocks[0]; b.Age != nil {
			text += fmt.Sprintf(" after %.1f s", *b.Age)
		}
	}
	if l.Parent != nil {
		text += " under " + l.Parent.String()
	}
	if l.LoRA != "" {
		text += " lora " + l.LoRA
	}
	if l.Load != nil {
		text += fmt.Sprintf(" from %s: %d bytes in %.3f s", l.Load.From, l.Load.Bytes, l.Load.Duration)
	}
	return text
}
