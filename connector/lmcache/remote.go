package lmcache

import (
	"context"
	"fmt"

	"kvstrata/connector/store"
)

// remote is the client of an lm:// server.
type remote struct {
	*pool
	protocol Protocol
	pipeline int
}

var _ client = (*remote)(nil)

func (r *remote) name() string { return "lm://" + r.address }

func (r *remote) maxKey() int { return MaxKey }

// read reads a reply.
func (r *remote) read(c *conn) (Reply, error) {
	frame, err := c.in.Peek(r.protocol.ReplyBytes())
	if err != nil {
		if len(frame) > 0 {
			return Reply{}, unexpected(err)
		}
		return Reply{}, err
	}
	reply, err := r.protocol.ParseReply(frame)
	if err == nil {
		_, err = c.in.Discard(len(frame))
	}
	return reply, err
}

// short reads a reply that no value follows.
func (r *remote) short(c *conn) (bool, error) {
	reply, err := r.read(c)
	if err == nil && reply.Length > 0 {
		err = fmt.Errorf("%v with %d bytes behind it: %w", reply.Code, reply.Length, errFrame)
	}
	return reply.Code == Success, err
}

func (r *remote) ask(command Command) func([]byte, string) ([]byte, error) {
	return func(dst []byte, key string) ([]byte, error) {
		return r.protocol.AppendRequest(dst, &Request{Command: command, Key: key, Content: noContent})
	}
}

func (r *remote) exist(ctx context.Context, keys []string) ([]bool, error) {
	return r.pool.exist(ctx, keys, r.ask(Exist), r.short)
}

// put stores chunks. A PUT has no reply: an EXIST behind each tells that the server has taken it.
func (r *remote) put(ctx context.Context, chunks []chunk, errs []error) {
	r.windows(chunks, r.pipeline, func(first, end int) {
		part := chunks[first:end]
		r.putWindow(ctx, part, errs[first:end], func(c *conn) error { return r.write(c, part) }, r.confirm)
	})
}

func (r *remote) write(c *conn, chunks []chunk) (err error) {
	size := r.protocol.RequestBytes()
	for i := range chunks {
		at := len(c.frames)
		put := Request{Command: Put, Length: chunks[i].bytes, Content: chunks[i].content, Key: chunks[i].key}
		if c.frames, err = r.protocol.AppendRequest(c.frames, &put); err != nil {
			return err
		}
		if c.frames, err = r.ask(Exist)(c.frames, chunks[i].key); err != nil {
			return err
		}
		c.out = append(c.out, c.frames[at:at+size])
		c.out = append(c.out, chunks[i].pieces...)
		c.out = append(c.out, c.frames[at+size:at+2*size])
	}
	return nil
}

func (r *remote) confirm(c *conn, sent *chunk) (refused, broken error) {
	ok, err := r.short(c)
	if err == nil && !ok {
		refused = fmt.Errorf("put %s, %d bytes: %w", sent.key, sent.bytes, ErrRefused)
	}
	return refused, err
}

// get reads chunks into their pieces.
func (r *remote) get(ctx context.Context, chunks []chunk, errs []error) {
	r.windows(chunks, r.pipeline, func(first, end int) {
		r.getWindow(ctx, chunks[first:end], errs[first:end], r.ask(Get), r.receive)
	})
}

// receive reads one answer. It tells whether a value was being read, and what is wrong with the chunk and the connection.
func (r *remote) receive(c *conn, want *chunk) (begun bool, refused, broken error) {
	reply, err := r.read(c)
	switch {
	case err != nil:
		return false, nil, err
	case reply.Code != Success && reply.Length > 0:
		return false, nil, fmt.Errorf("%v with %d bytes behind it: %w", reply.Code, reply.Length, errFrame)
	case reply.Code != Success:
		return false, fmt.Errorf("get %s: %w", want.key, store.ErrAbsent), nil
	case reply.Length != want.bytes || r.protocol != V0 && !reply.Content.same(&want.content):
		return true, want.other(reply.Length, &reply.Content), c.discard(reply.Length)
	default:
		return true, nil, c.fill(want.pieces)
	}
}

// other says that a key has another content than is wanted.
func (want *chunk) other(bytes int, is *Content) error {
	return fmt.Errorf("get %s: it has %d bytes, %v of %v in shape %v; wanted are %d, %v of %v in %v: %w", want.key,
		bytes, is.Format, is.DType, is.Shape, want.bytes, want.content.Format, want.content.DType, want.content.Shape, store.ErrAbsent)
}

// same reports whether two values of one length mean the same. An element type that is not told is taken to be right.
func (c *Content) same(want *Content) bool {
	return c.Format == want.Format && (c.DType == NoDType || c.DType.same(want.DType)) && c.Shape == want.Shape
}
