package event

import (
	"kvstrata/event/eventpb"

	"google.golang.org/protobuf/proto"
)

// MarshalStatus returns the payload of a message of kind `status`; the source stands in the subject.
func MarshalStatus(s *Status) ([]byte, error) {
	pb := &eventpb.Status{
		Epoch: uint64(s.Epoch), Fence: uint64(s.Fence), Seq: uint64(s.Seq), State: uint32(s.State), Reason: s.Reason,
		Time: int64(s.Time), Digest: uint64(s.Digest), Ledger: ledgerToPB(&s.Ledger), Dialect: s.Dialect,
		Endpoint: s.Endpoint, Copies: uint32(s.Copies), PoolSize: s.PoolSize, Stores: s.Stores,
		Groups: groupsToPB(s.Groups), Withdrawn: s.Withdrawn, Contract: contractToPB(&s.Contract),
		HashScheme: s.HashScheme, HashSeed: s.HashSeed, PastLives: pastLivesToPB(s.PastLives),
	}
	for _, c := range s.Counters {
		pb.Counters = append(pb.Counters, &eventpb.Counter{Name: c.Name, Count: c.Count, Example: c.Example})
	}
	return proto.Marshal(pb)
}

// UnmarshalStatus reads what MarshalStatus wrote, for the source that the subject names.
func UnmarshalStatus(payload []byte, source Source) (Status, error) {
	var pb eventpb.Status
	if err := proto.Unmarshal(payload, &pb); err != nil {
		return Status{}, &WireError{Field: "status", Reason: err.Error()}
	}
	s := Status{
		Source: source, Epoch: Epoch(pb.Epoch), Fence: Fence(pb.Fence), Seq: Seq(pb.Seq), State: State(pb.State),
		Reason: pb.Reason, Time: Time(pb.Time), Digest: Digest(pb.Digest), Ledger: ledgerFromPB(pb.Ledger),
		Dialect: pb.Dialect, Endpoint: pb.Endpoint, Copies: CopyMode(pb.Copies), PoolSize: pb.PoolSize,
		Stores: pb.Stores, Groups: groupsFromPB(pb.Groups), Withdrawn: pb.Withdrawn,
		Contract:   contractFromPB(pb.Contract),
		HashScheme: pb.HashScheme, HashSeed: pb.HashSeed, PastLives: pastLivesFromPB(pb.PastLives),
	}
	for _, c := range pb.Counters {
		s.Counters = append(s.Counters, Counter{Name: c.Name, Count: c.Count, Example: c.Example})
	}
	return s, nil
}

func contractToPB(c *Contract) *eventpb.Contract {
	return &eventpb.Contract{
		Forms: c.Forms, Fields: c.Fields, Hashes: c.Hashes, Media: c.Media,
		Check: &eventpb.HashCheck{
			Verdict: uint32(c.Check.Verdict), Scheme: c.Check.Scheme, Seed: c.Check.Seed, Keys: c.Check.Keys,
			Verified: c.Check.Verified, Differ: c.Check.Differ, Skipped: c.Check.Skipped, Reason: c.Check.Reason,
		},
	}
}

func contractFromPB(pb *eventpb.Contract) Contract {
	return Contract{
		Forms: pb.GetForms(), Fields: pb.GetFields(), Hashes: pb.GetHashes(), Media: pb.GetMedia(),
		Check: HashContract{
			Verdict: HashVerdict(pb.GetCheck().GetVerdict()), Scheme: pb.GetCheck().GetScheme(), Seed: pb.GetCheck().GetSeed(),
			Keys: pb.GetCheck().GetKeys(), Verified: pb.GetCheck().GetVerified(), Differ: pb.GetCheck().GetDiffer(),
			Skipped: pb.GetCheck().GetSkipped(), Reason: pb.GetCheck().GetReason(),
		},
	}
}

func ledgerToPB(l *Ledger) *eventpb.Ledger {
	pb := &eventpb.Ledger{
		Started: l.Started, First: uint64(l.First), Last: uint64(l.Last), Live: l.Live, Recovered: l.Recovered,
		Held: l.Held, Asked: l.Asked, Lost: l.Lost, Duplicates: l.Duplicates, Malformed: l.Malformed, Dropped: l.Dropped,
	}
	for _, h := range l.Holes {
		pb.Holes = append(pb.Holes, &eventpb.Hole{First: uint64(h.First), Last: uint64(h.Last), Reason: h.Reason})
	}
	return pb
}

func ledgerFromPB(pb *eventpb.Ledger) Ledger {
	l := Ledger{
		Started: pb.GetStarted(), First: Seq(pb.GetFirst()), Last: Seq(pb.GetLast()), Live: pb.GetLive(),
		Recovered: pb.GetRecovered(), Held: pb.GetHeld(), Asked: pb.GetAsked(), Lost: pb.GetLost(),
		Duplicates: pb.GetDuplicates(), Malformed: pb.GetMalformed(), Dropped: pb.GetDropped(),
	}
	for _, h := range pb.GetHoles() {
		l.Holes = append(l.Holes, Hole{First: Seq(h.First), Last: Seq(h.Last), Reason: h.Reason})
	}
	return l
}

func pastLivesToPB(lives []PastLife) []*eventpb.PastLife {
	var pb []*eventpb.PastLife
	for i := range lives {
		l := &lives[i]
		pb = append(pb, &eventpb.PastLife{Epoch: uint64(l.Epoch), Ledger: ledgerToPB(&l.Ledger), TailUnknown: l.TailUnknown})
	}
	return pb
}

// pastLivesFromPB keeps the newest of what may be more than we remember.
func pastLivesFromPB(pb []*eventpb.PastLife) []PastLife {
	var lives []PastLife
	for _, l := range pb[max(0, len(pb)-MaxPastLives):] {
		lives = append(lives, PastLife{Epoch: Epoch(l.GetEpoch()), Ledger: ledgerFromPB(l.GetLedger()), TailUnknown: l.GetTailUnknown()})
	}
	return lives
}

func groupsToPB(groups []GroupInfo) []*eventpb.Group {
	var pb []*eventpb.Group
	for _, g := range groups {
		pb = append(pb, &eventpb.Group{
			Group: uint32(g.Group + 1), BlockSize: g.BlockSize, SpecKind: uint32(g.Spec), Window: g.Window, Eagle: g.Eagle,
		})
	}
	return pb
}

func groupsFromPB(pb []*eventpb.Group) []GroupInfo {
	var groups []GroupInfo
	for _, g := range pb {
		groups = append(groups, GroupInfo{
			Group: Group(g.Group) - 1, BlockSize: g.BlockSize, Spec: SpecKind(g.SpecKind), Window: g.Window, Eagle: g.Eagle,
		})
	}
	return groups
}
