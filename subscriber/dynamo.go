package subscriber

import "kvstrata/event"

// Dynamo's router events are JSON: {worker_id, storage_tier, event: {event_id, data, dp_rank}}, or the inner event alone. Its
// recorder writes a line each, {timestamp, event: …}, the timestamp in ms since it began. They tell no tokens, but each block's
// local hash, which is ours in the scheme without a key; and no block size, which has to be configured.

// dynamoTiers are the tiers by Dynamo's names.
var dynamoTiers = map[string]event.Tier{
	"": event.GPU, "device": event.GPU, "host_pinned": event.CPU, "disk": event.Disk, "external": event.External,
}

// dynamo reads one router event.
func (d *Decoder) dynamo(raw []byte) (rank int32, err error) {
	rank = -1
	var path, tier string
	top, err := d.object(raw, "", "timestamp", "event", "worker_id", "storage_tier", "residency_domain", "state_source", "session_id", "event_id",
		"data", "dp_rank")
	for depth := 0; err == nil && top["event"] != nil && depth < 2; depth++ { // out of the recorder's line, out of the router's event
		if err := top.field(path, "storage_tier", &tier); err != nil {
			return rank, err
		}
		path, raw = path+"event", top["event"]
		top, err = d.object(raw, path, "event", "worker_id", "storage_tier", "residency_domain", "state_source", "session_id", "event_id", "data", "dp_rank")
		path += "."
	}
	if err != nil {
		return rank, err
	}
	if err := top.field(path, "dp_rank", &rank); err != nil {
		return rank, err
	}
	where, ok := dynamoTiers[tier]
	if !ok {
		d.odd("unknown storage tier", "", []byte(tier))
		where = event.Tier(d.words.keep([]byte(tier)))
	}
	d.sight.medium(string(where))
	return rank, d.dynamoData(top["data"], where)
}

func (d *Decoder) dynamoData(raw []byte, tier event.Tier) error {
	if string(raw) == `"cleared"` {
		d.sight.cleared = true
		d.events = append(d.events, event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID})
		return nil
	}
	data, err := d.object(raw, "data", "stored", "removed", "cleared")
	if err != nil {
		return err
	}
	switch {
	case data["stored"] != nil:
		return d.dynamoStored(data["stored"], tier)
	case data["removed"] != nil:
		var hashes []jsonHash
		removed, err := d.object(data["removed"], "removed", "block_hashes")
		if err == nil {
			err = removed.field("removed", "block_hashes", &hashes)
		}
		if err != nil {
			return err
		}
		d.events = append(d.events, event.Event{
			Kind: event.Evicted, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: d.jsonBlocks(hashes),
		})
	default:
		d.odd("unknown event", "", nil)
	}
	return nil
}

func (d *Decoder) dynamoStored(raw []byte, tier event.Tier) error {
	var parent *jsonHash
	var blocks []struct {
		Hash  jsonHash `json:"block_hash"`
		Local uint64   `json:"tokens_hash"`
	}
	stored, err := d.object(raw, "stored", "parent_hash", "start_position", "blocks")
	if err == nil {
		err = stored.fields("stored", value{"parent_hash", &parent}, value{"blocks", &blocks})
	}
	if err != nil {
		return err
	}
	d.sight.any = true
	ev := event.Event{Kind: event.Stored, Tier: tier, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: d.cfg.BlockSize}
	if parent != nil {
		ev.HasParent, ev.Parent = true, parent.BlockHash
	}
	hashes := make([]jsonHash, len(blocks))
	ev.Locals = make([]uint64, len(blocks))
	for i, b := range blocks {
		hashes[i], ev.Locals[i] = b.Hash, b.Local
	}
	ev.Blocks = d.jsonBlocks(hashes)
	d.events = append(d.events, ev)
	return nil
}
