package event

import (
	"time"

	"kvstrata/event/eventpb"

	"google.golang.org/protobuf/proto"
)

// TransferKind says what a [Transfer] tells.
type TransferKind uint8

// The kinds of transfer records.
const (
	TransferLoaded TransferKind = 1 + iota // bytes came from outside into the engine's blocks
	TransferSaved                          // bytes went from the engine's blocks to a store
	TransferFailed                         // a load or a save did not do all that it was to do
	LeaseExpired                           // a producer freed blocks that no consumer had fetched in time
)

var transferNames = []string{TransferLoaded: "loaded", TransferSaved: "saved", TransferFailed: "failed", LeaseExpired: "lease_expired"}

func (k TransferKind) String() string { return enumString(transferNames, "TransferKind", k) }

// MarshalText writes the kind's name.
func (k TransferKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads a kind's name.
func (k *TransferKind) UnmarshalText(text []byte) (err error) {
	*k, err = parseEnum[TransferKind](transferNames, "transfer kind", string(text))
	return err
}

// Transfer is a record of kind `transfer`: one transfer of one request, or a lease that ended unused. It changes no
// resident set and has no sequence: what a full queue drops of records is counted, and not told.
type Transfer struct {
	Source    Source
	Kind      TransferKind
	Time      Time   // when it ended, by the engine's clock
	Transport string // the connector's name: tcp, redis, …
	Request   string
	Peer      string // where the bytes came from or went
	From, To  Tier
	Blocks    uint32 // that were to be moved; of a failed one, those that were not
	Ranks     uint32 // tensor-parallel ranks whose transfers are in it
	Bytes     uint64 // moved, over all ranks
	Pieces    uint64 // contiguous pieces of memory, over all ranks
	// Duration is from post to completion, Post that of the call that posted: of the slowest rank.
	Duration time.Duration
	Post     time.Duration
	Reason   string // of a failed one
}

// MarshalTransfers returns the payload of a message of kind `transfer`; the source stands in the subject. Texts are cut to 512
// bytes, and what is no UTF-8 in them is replaced.
func MarshalTransfers(records []Transfer) ([]byte, error) {
	pb := &eventpb.Transfers{}
	for i := range records {
		t := &records[i]
		pb.Transfers = append(pb.Transfers, &eventpb.Transfer{
			Kind: uint32(t.Kind), Time: int64(t.Time), Transport: recordText(t.Transport), Request: recordText(t.Request),
			Peer: recordText(t.Peer), FromTier: recordText(string(t.From)), ToTier: recordText(string(t.To)), Blocks: t.Blocks, Ranks: t.Ranks, Bytes: t.Bytes, Pieces: t.Pieces,
			Duration: uint64(t.Duration), Post: uint64(t.Post), Reason: recordText(t.Reason),
		})
	}
	return proto.Marshal(pb)
}

// UnmarshalTransfers reads what MarshalTransfers wrote, for the source that the subject names.
func UnmarshalTransfers(payload []byte, source Source) ([]Transfer, error) {
	var pb eventpb.Transfers
	if err := proto.Unmarshal(payload, &pb); err != nil {
		return nil, &WireError{Field: "transfers", Reason: err.Error()}
	}
	records := make([]Transfer, 0, len(pb.Transfers))
	for _, t := range pb.Transfers {
		records = append(records, Transfer{
			Source: source, Kind: TransferKind(t.GetKind()), Time: Time(t.GetTime()), Transport: t.GetTransport(), Request: t.GetRequest(),
			Peer: t.GetPeer(), From: Tier(t.GetFromTier()), To: Tier(t.GetToTier()), Blocks: t.GetBlocks(), Ranks: t.GetRanks(),
			Bytes: t.GetBytes(), Pieces: t.GetPieces(), Duration: time.Duration(t.GetDuration()), Post: time.Duration(t.GetPost()),
			Reason: t.GetReason(),
		})
	}
	return records, nil
}
