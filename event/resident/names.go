package resident

// names orders the records that are only names, oldest first: a ring of numbers, in which a record knows its place, so that one
// in the middle leaves a hole. Where most are holes, those behind move up, a few with every name that comes.
type names struct {
	ring   []int32 // a power of two; a record's number plus one, 0 = a hole
	head   int     // the oldest is here, or behind it; places count on, and are taken modulo the ring's size
	tail   int     // where the next one goes
	length int

	moving   bool
	from, to int // names between head and to have moved up, and those from `from` on have not
}

const (
	firstRing = 64
	sparse    = 4 // places a name at which names move up
	moveUp    = 8 // places at a time
)

func (q *names) place(at int) *int32 { return &q.ring[at&(len(q.ring)-1)] }

// push makes record i, which is to be written, the newest.
func (q *names) push(s *slab, i int32, r *record) {
	if q.tail-q.head == len(q.ring) {
		q.grow()
	}
	r.flags |= recQueued
	r.link = uint32(q.tail)
	*q.place(q.tail) = i + 1
	q.tail++
	q.length++
	if q.moving || q.tail-q.head > sparse*q.length+firstRing {
		q.tidy(s)
	}
}

// remove takes out a record, wherever it is.
func (q *names) remove(r *record) {
	*q.place(int(r.link)) = 0
	r.flags &^= recQueued
	r.link = 0
	q.length--
}

// oldest returns the record that has been in longest; there must be one.
func (q *names) oldest() int32 {
	for *q.place(q.head) == 0 {
		q.head++
	}
	return *q.place(q.head) - 1
}

// first appends the oldest records to some, up to n.
func (q *names) first(records []int32, n int) []int32 {
	for at := q.head; at < q.tail && len(records) < n; at++ {
		if i := *q.place(at); i != 0 {
			records = append(records, i-1)
		}
	}
	return records
}

func (q *names) grow() {
	ring := make([]int32, max(firstRing, 2*len(q.ring)))
	for at := q.head; at < q.tail; at++ {
		ring[at&(len(ring)-1)] = *q.place(at)
	}
	q.ring = ring
}

// tidy moves the next few names up.
func (q *names) tidy(s *slab) {
	if !q.moving {
		q.moving, q.from, q.to = true, q.head, q.head
	}
	q.to = max(q.to, q.head)
	q.from = max(q.from, q.to)
	for range min(moveUp, q.tail-q.from) {
		if i := *q.place(q.from); i != 0 {
			*q.place(q.from) = 0
			*q.place(q.to) = i
			s.edit(i - 1).link = uint32(q.to)
			q.to++
		}
		q.from++
	}
	if q.from == q.tail {
		q.tail, q.moving = q.to, false
	}
}
