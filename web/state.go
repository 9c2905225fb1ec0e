package web

import (
	"bytes"
	"encoding/json"
	"strconv"
	"time"

	"github.com/gorilla/websocket"
)

// maxTombstones is how many deleted keys are remembered for the sake of clients that are behind; beyond it, those
// clients get everything.
const maxTombstones = 4096

// document is one JSON document of the state. A document that was never told has no version.
type document struct {
	key     string
	quoted  []byte // key, as JSON
	body    []byte // written under the hub's lock, by the hub's goroutine alone
	version uint64 // of the last change

	// Of the hub's goroutine.
	next  []byte // what the panel puts now, if it is not body
	round uint64 // of its panel, when it was put
}

func newDocument(key string) *document {
	quoted, err := json.Marshal(key)
	if err != nil {
		panic("web: a string can't be marshalled: " + err.Error())
	}
	return &document{key: key, quoted: quoted}
}

// state is a set of documents and which version changed each. It has no lock of its own.
type state struct {
	version uint64 // from 1, so that 0 is a client that has nothing
	now     time.Time
	docs    map[string]*document
	gone    map[string]uint64 // deleted keys, and the version that deleted them
	floor   uint64            // deletions at or before it are forgotten
	frames  map[uint64]*frame // from a version to the present one, made when first asked for
}

// frame brings a client from one version to another.
type frame struct {
	message *websocket.PreparedMessage
	size    int    // bytes, before compression
	version uint64 // the client's afterwards
}

func newState() state {
	return state{version: 1, docs: make(map[string]*document), gone: make(map[string]uint64), frames: make(map[uint64]*frame)}
}

// advance makes a version, if anything changed: one for all that a tick brought.
func (s *state) advance(now time.Time, changed, removed []*document) {
	if len(changed)+len(removed) == 0 {
		return
	}
	if len(s.gone)+len(removed) > maxTombstones {
		clear(s.gone)
		s.floor = s.version
	}
	s.version++
	s.now = now
	for _, d := range removed {
		if d.version > 0 {
			delete(s.docs, d.key)
			s.gone[d.key] = s.version
		}
	}
	for _, d := range changed {
		d.body, d.next, d.version = d.next, nil, s.version
		s.docs[d.key] = d
		delete(s.gone, d.key)
	}
	clear(s.frames)
}

// frame returns the frame from a version to the present one; nil when that is the present one.
func (s *state) frame(from uint64) (*frame, error) {
	if from == s.version {
		return nil, nil
	}
	if from < s.floor {
		from = 0
	}
	if f := s.frames[from]; f != nil {
		return f, nil
	}
	data := s.encode(from)
	message, err := websocket.NewPreparedMessage(websocket.TextMessage, data)
	if err != nil {
		return nil, err
	}
	f := &frame{message: message, size: len(data), version: s.version}
	s.frames[from] = f
	return f, nil
}

func (s *state) encode(from uint64) []byte {
	var b bytes.Buffer
	b.WriteString(`{"v":`)
	b.WriteString(strconv.FormatUint(s.version, 10))
	b.WriteString(`,"full":`)
	b.WriteString(strconv.FormatBool(from == 0))
	b.WriteString(`,"now":`)
	b.WriteString(strconv.FormatInt(s.now.UnixMilli(), 10))
	b.WriteString(`,"set":{`)
	first := true
	for _, d := range s.docs {
		if d.version <= from {
			continue
		}
		if !first {
			b.WriteByte(',')
		}
		first = false
		b.Write(d.quoted)
		b.WriteByte(':')
		b.Write(d.body)
	}
	b.WriteString(`},"del":[`)
	if from > 0 {
		first = true
		for key, version := range s.gone {
			if version <= from {
				continue
			}
			if !first {
				b.WriteByte(',')
			}
			first = false
			b.Write(newDocument(key).quoted)
		}
	}
	b.WriteString(`]}`)
	return b.Bytes()
}
