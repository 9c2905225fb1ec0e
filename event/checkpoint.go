package event

import "time"

// MaxRecents is how many of the last batches a checkpoint remembers, to tell one life of an engine from another.
const MaxRecents = 64

// Recent is what is remembered of one batch.
type Recent struct {
	Seq     Seq
	Time    Time
	Payload uint64
}

// Checkpoint is everything known of a source after one batch: the one mechanism for restart, late join and resync.
// It travels as an object named source/epoch/fence/sequence/written; see docs/format/event.md.
type Checkpoint struct {
	Source   Source
	Epoch    Epoch
	Fence    Fence
	Seq      Seq // of the last batch in it; meaningless unless Ledger.Started
	State    State
	Reason   string
	Written  Time
	Digest   Digest
	Ledger   Ledger
	Position Position // of an acknowledged message behind which the source's stream goes on from Seq
	Recents  []Recent // the last MaxRecents, oldest first
	Groups   []GroupInfo
	Entries  uint64 // how many follow
	Fullest  uint64 // most blocks that were resident at once in this life

	PastLives []PastLife // the newest MaxPastLives that ended, newest last
}

// Entry is one row of a checkpoint: a block in a tier, or, with Copies 0, a name that outlived its block.
type Entry struct {
	Hash      BlockHash
	Group     Group
	Tier      Tier
	Copies    uint32
	Stored    Time // when copies rose from 0, by the engine's clock; 0 = unknown
	Prefix    PrefixHash
	Local     uint64 // the local hash, while the prefix hash is unknown because the parent is
	HasParent bool
	Parent    BlockHash
	Seed      uint64 // sealed (Hasher.Seal)
	BlockSize uint32
	Eagle     bool
}

// Age returns how long a block had been stored at a batch's engine time; −1 when either is unknown, or the engine's
// clock went back.
func Age(stored, now Time) time.Duration {
	if stored == 0 || now == 0 || now < stored {
		return -1
	}
	return time.Duration(now - stored)
}
