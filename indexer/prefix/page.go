package prefix

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"

	"kvstrata/event"
)

// Bounds of a page.
const (
	defaultPage = 1000
	maxPage     = 10_000
	maxLook     = 1 << 15 // places looked at for a page, while the index stands still
)

// ErrListingEnded says that a listing can't be continued: the source was begun anew, and its blocks lie elsewhere.
var ErrListingEnded = errors.New("the source began a new life, or was read from a checkpoint, since the first page; list it anew")

// PageRequest asks for some of a source's resident blocks.
type PageRequest struct {
	Source string
	Limit  int    // blocks; 0 = 1,000
	After  string // Next of the page before; empty = the first page
}

// Page is some of a source's resident blocks, in no order that means anything.
type Page struct {
	Source event.Source `json:"source"`
	Epoch  event.Epoch  `json:"epoch"`
	Seq    event.Seq    `json:"seq"` // the last batch that this page knows; pages know different ones
	Blocks []PageBlock  `json:"blocks"`
	Next   string       `json:"next,omitempty"` // empty = this was the last page
}

// PageBlock is a resident block in a tier of a group.
type PageBlock struct {
	Hash      event.BlockHash   `json:"hash"`
	Prefix    *event.PrefixHash `json:"prefix,omitempty"`
	Tier      event.Tier        `json:"tier"`
	Group     uint32            `json:"group"`
	Copies    uint32            `json:"copies"`
	BlockSize uint32            `json:"block_size,omitempty"`
}

// cursor is where a listing goes on.
type cursor struct {
	turn  int64 // the source's
	place uint64
}

func (c cursor) String() string {
	b := binary.BigEndian.AppendUint64(nil, uint64(c.turn))
	return base64.RawURLEncoding.EncodeToString(binary.AppendUvarint(b, c.place))
}

func parseCursor(text string) (c cursor, err error) {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil && len(b) > 8 {
		place, n := binary.Uvarint(b[8:])
		c = cursor{int64(binary.BigEndian.Uint64(b)), place}
		if n == len(b)-8 && place > 0 && c.String() == text {
			return c, nil
		}
	}
	return c, fmt.Errorf("after %q: want next of the page before", text)
}

// Page returns a page of a source's resident blocks; of a life that its publisher has ended there are none. Going on from page to
// page gives each block that is there all the while exactly once, and ends with ErrListingEnded where a listing can't be continued.
// A page may be short, or empty, and still be followed by another: only an empty Next is the end. A block's tiers stay together,
// so that a page may have some blocks more than its limit.
func (x *Index) Page(r *PageRequest) (*Page, error) {
	limit := cmp.Or(r.Limit, defaultPage)
	if limit < 1 || limit > maxPage {
		return nil, fmt.Errorf("limit %d: want 1 to %d", r.Limit, maxPage)
	}
	var from cursor
	if r.After != "" {
		var err error
		if from, err = parseCursor(r.After); err != nil {
			return nil, err
		}
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	s, err := x.sourceNamed(r.Source)
	if err != nil {
		return nil, err
	}
	if r.After != "" && from.turn != s.story.turn {
		return nil, fmt.Errorf("source %q: %w", r.Source, ErrListingEnded)
	}
	page := &Page{Source: s.name, Blocks: []PageBlock{}}
	place := from.place
	for looked := 0; looked < maxLook && len(page.Blocks) < limit; {
		n := min(maxLook-looked, limit-len(page.Blocks))
		looked += n
		p := x.list(s, place, n, func(e *event.Entry) { page.Blocks = append(page.Blocks, pageBlock(e)) })
		page.Epoch, page.Seq = p.epoch, p.seq
		if place = p.next; place == 0 {
			return page, nil
		}
	}
	page.Next = cursor{s.story.turn, place}.String()
	return page, nil
}

func pageBlock(e *event.Entry) PageBlock {
	b := PageBlock{Hash: e.Hash, Tier: e.Tier, Group: e.Group.Index(), Copies: e.Copies, BlockSize: e.BlockSize}
	if e.Prefix != 0 {
		b.Prefix = new(e.Prefix)
	}
	return b
}
