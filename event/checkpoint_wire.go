package event

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"

	"kvstrata/event/eventpb"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Field numbers of Entries in event.proto.
const (
	eNames      protowire.Number = 1
	eFlags      protowire.Number = 2
	eHashes     protowire.Number = 3
	eHashLength protowire.Number = 4
	eGroup      protowire.Number = 5
	eTier       protowire.Number = 6
	eCopies     protowire.Number = 7
	eStored     protowire.Number = 8
	ePrefix     protowire.Number = 9
	eSeed       protowire.Number = 10
	eBlockSize  protowire.Number = 11

	numEntryColumns = 12
)

// flagLocal says that an entry's prefix column holds the local hash.
const flagLocal = flagUnrooted

const (
	partRows = 4096    // entries a part
	maxPart  = 1 << 24 // bytes; a longer part is not one of ours
)

// WriteCheckpoint writes a checkpoint object: the header, then the entries in parts. cp.Entries must be their number.
func WriteCheckpoint(w io.Writer, cp *Checkpoint, entries iter.Seq[*Entry]) error {
	pb := &eventpb.CheckpointHeader{
		Source: cp.Source.Tokens(), Epoch: uint64(cp.Epoch), Fence: uint64(cp.Fence), Seq: uint64(cp.Seq),
		State: uint32(cp.State), Reason: cp.Reason, Written: int64(cp.Written), Digest: uint64(cp.Digest),
		Ledger: ledgerToPB(&cp.Ledger), Stream: cp.Position.Stream, StreamCreated: int64(cp.Position.Created),
		StreamSequence: cp.Position.Sequence, Groups: groupsToPB(cp.Groups), Entries: cp.Entries, Fullest: cp.Fullest,
		PastLives: pastLivesToPB(cp.PastLives),
	}
	for _, r := range cp.Recents {
		pb.RecentSeq = append(pb.RecentSeq, uint64(r.Seq))
		pb.RecentTime = append(pb.RecentTime, int64(r.Time))
		pb.RecentPayloadXxh3 = append(pb.RecentPayloadXxh3, r.Payload)
	}
	header, err := proto.Marshal(pb)
	if err != nil {
		return fmt.Errorf("encode checkpoint of %v: %w", cp.Source, err)
	}
	out := bufio.NewWriterSize(w, 1<<16)
	writePart := func(part []byte) error {
		var length [binary.MaxVarintLen64]byte
		if _, err := out.Write(length[:binary.PutUvarint(length[:], uint64(len(part)))]); err != nil {
			return err
		}
		_, err := out.Write(part)
		return err
	}
	if err := writePart(header); err != nil {
		return fmt.Errorf("write checkpoint of %v: %w", cp.Source, err)
	}
	var enc entryEncoder
	var buf []byte
	for e := range entries {
		enc.add(e)
		if enc.rows == partRows {
			buf = enc.encode(buf[:0])
			if err := writePart(buf); err != nil {
				return fmt.Errorf("write checkpoint of %v: %w", cp.Source, err)
			}
		}
	}
	if enc.rows > 0 {
		if err := writePart(enc.encode(buf[:0])); err != nil {
			return fmt.Errorf("write checkpoint of %v: %w", cp.Source, err)
		}
	}
	return out.Flush()
}

// ReadCheckpoint reads a checkpoint object and hands each entry to add; the pointer is valid until add returns.
func ReadCheckpoint(r io.Reader, add func(*Entry)) (*Checkpoint, error) {
	return ScanCheckpoint(r, func(*Checkpoint) {}, add)
}

// ScanCheckpoint is ReadCheckpoint for who needs the header first: it hands it to begin before the first entry.
func ScanCheckpoint(r io.Reader, begin func(*Checkpoint), add func(*Entry)) (*Checkpoint, error) {
	in := bufio.NewReaderSize(r, 1<<16)
	part, err := readPart(in, nil)
	if err != nil {
		return nil, fmt.Errorf("read checkpoint header: %w", err)
	}
	cp, err := decodeHeader(part)
	if err != nil {
		return nil, fmt.Errorf("read checkpoint header: %w", err)
	}
	begin(cp)
	dec := entryDecoder{intern: make(interner)}
	var rows uint64
	for {
		part, err = readPart(in, part)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read checkpoint of %v: %w", cp.Source, err)
		}
		n, err := dec.decode(part, add)
		if err != nil {
			return nil, fmt.Errorf("read checkpoint of %v: %w", cp.Source, err)
		}
		rows += uint64(n)
	}
	if rows != cp.Entries {
		return nil, fmt.Errorf("read checkpoint of %v: %w", cp.Source, &WireError{
			Field: "entries", Reason: fmt.Sprintf("header promises %d rows, object holds %d", cp.Entries, rows),
		})
	}
	return cp, nil
}

// readPart returns the next part, or io.EOF where the object ends between parts.
func readPart(in *bufio.Reader, buf []byte) ([]byte, error) {
	length, err := binary.ReadUvarint(in)
	if err != nil {
		return nil, err
	}
	if length > maxPart {
		return nil, &WireError{Field: "part", Reason: fmt.Sprintf("%d bytes long", length)}
	}
	// A truncated object must not cost the memory that it promises.
	buf = buf[:0]
	for uint64(len(buf)) < length {
		chunk := int(min(length-uint64(len(buf)), 1<<16))
		at := len(buf)
		buf = append(buf, make([]byte, chunk)...)
		if _, err := io.ReadFull(in, buf[at:]); err != nil {
			return nil, &WireError{Field: "part", Reason: "truncated"}
		}
	}
	return buf, nil
}

func decodeHeader(part []byte) (*Checkpoint, error) {
	var pb eventpb.CheckpointHeader
	if err := proto.Unmarshal(part, &pb); err != nil {
		return nil, &WireError{Field: "header", Reason: err.Error()}
	}
	source, err := ParseSource(pb.Source)
	if err != nil {
		return nil, &WireError{Field: "source", Reason: err.Error()}
	}
	if len(pb.RecentSeq) != len(pb.RecentTime) || len(pb.RecentSeq) != len(pb.RecentPayloadXxh3) {
		return nil, &WireError{Field: "recent_seq", Reason: "rows do not add up"}
	}
	cp := &Checkpoint{
		Source: source, Epoch: Epoch(pb.Epoch), Fence: Fence(pb.Fence), Seq: Seq(pb.Seq), State: State(pb.State),
		Reason: pb.Reason, Written: Time(pb.Written), Digest: Digest(pb.Digest), Ledger: ledgerFromPB(pb.Ledger),
		Position: Position{Stream: pb.Stream, Created: Time(pb.StreamCreated), Sequence: pb.StreamSequence},
		Groups:   groupsFromPB(pb.Groups), Entries: pb.Entries, Fullest: pb.Fullest, PastLives: pastLivesFromPB(pb.PastLives),
	}
	for i := range pb.RecentSeq {
		cp.Recents = append(cp.Recents, Recent{
			Seq: Seq(pb.RecentSeq[i]), Time: Time(pb.RecentTime[i]), Payload: pb.RecentPayloadXxh3[i],
		})
	}
	return cp, nil
}

type entryEncoder struct {
	names   dictionary
	hashes  hashColumn
	columns [numEntryColumns]column
	rows    int
}

func (enc *entryEncoder) add(e *Entry) {
	c := &enc.columns
	var flags uint64
	enc.hashes.add(e.Hash)
	if e.HasParent {
		flags |= flagParent
		enc.hashes.add(e.Parent)
	}
	if e.Eagle {
		flags |= flagEagle
	}
	prefix := uint64(e.Prefix)
	if e.Prefix == 0 && e.Local != 0 {
		flags |= flagLocal
		prefix = e.Local
	}
	c[eFlags].varint(flags)
	c[eGroup].varint(uint64(e.Group + 1))
	c[eTier].varint(enc.names.id(string(e.Tier)))
	c[eCopies].varint(uint64(e.Copies))
	c[eStored].varint(uint64(e.Stored))
	c[ePrefix].fixed(prefix)
	c[eSeed].fixed(e.Seed)
	c[eBlockSize].varint(uint64(e.BlockSize))
	enc.rows++
}

func (enc *entryEncoder) encode(dst []byte) []byte {
	dst = enc.names.appendTo(dst, eNames)
	dst = enc.columns[eFlags].appendAlways(dst, eFlags)
	dst = enc.hashes.appendTo(dst, eHashes, eHashLength)
	for num := eGroup; num < numEntryColumns; num++ {
		dst = enc.columns[num].appendTo(dst, num)
	}
	for i := range enc.columns {
		enc.columns[i].reset()
	}
	enc.names.reset()
	enc.hashes.reset()
	enc.rows = 0
	return dst
}

type entryDecoder struct {
	intern interner
	entry  Entry // that was handed out last
}

func (dec *entryDecoder) decode(part []byte, add func(*Entry)) (rows int, err error) {
	var names []string
	var found hashCursor
	var columns [numEntryColumns]cursor
	err = fields(part, func(num protowire.Number, typ protowire.Type, b []byte, _ uint64) error {
		switch {
		case typ != protowire.BytesType:
		case num == eNames:
			names = append(names, dec.intern.string(b))
		case num == eHashes:
			found.bytes = b
		case num == eHashLength:
			found.long = cursor{buf: b, present: true}
		case num < numEntryColumns:
			columns[num] = cursor{buf: b, present: true}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	c, hashes := columns, found // copies that stay off the heap: they are written at every row
	e := &dec.entry
	for rows = c[eFlags].rows(); len(c[eFlags].buf) > 0 && !c[eFlags].bad; {
		flags := c[eFlags].varint()
		*e = Entry{
			Hash: hashes.next(), HasParent: flags&flagParent != 0, Eagle: flags&flagEagle != 0,
			Group: Group(c[eGroup].varint()) - 1, Copies: uint32(c[eCopies].varint()), Stored: Time(c[eStored].varint()),
			Seed: c[eSeed].fixed(), BlockSize: uint32(c[eBlockSize].varint()),
		}
		if e.HasParent {
			e.Parent = hashes.next()
		}
		if tier := c[eTier].varint(); tier > uint64(len(names)) {
			return 0, &WireError{Field: "tier", Reason: "no such name"}
		} else if tier > 0 {
			e.Tier = Tier(names[tier-1])
		}
		if prefix := c[ePrefix].fixed(); flags&flagLocal != 0 {
			e.Local = prefix
		} else {
			e.Prefix = PrefixHash(prefix)
		}
		if hashes.bad {
			return 0, &WireError{Field: "hashes", Reason: "rows do not add up"}
		}
		add(e)
	}
	for num := range c {
		if !c[num].done() {
			return 0, &WireError{Field: "entries", Reason: fmt.Sprintf("column %d: rows do not add up", num)}
		}
	}
	if !hashes.done() {
		return 0, &WireError{Field: "hashes", Reason: "rows do not add up"}
	}
	return rows, nil
}
