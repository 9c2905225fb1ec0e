package history

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// A question about single blocks looks at one in so many when there are many. Hashes are spread evenly, and rows lie in their order
// within each hour: those up to a bound are a sample that takes its share of the time.

// sample is the parameter that says how many.
var sample = Param{"sample", "number", "0", "Look at one block in so many; 1: at all of them; 0: at some 100,000 events."}

// eventsSampled is how many block events a question looks at if it may choose.
const eventsSampled = 100_000

// inSample are the rows that are looked at. Every number of blocks is to be multiplied by share.
const inSample = `hash <= {below:UInt64}`

// share finds of how many blocks one is looked at, at some events if it may choose, and binds it.
func (r *Reader) share(ctx context.Context, bound clickhouse.Parameters) (share uint64, err error) {
	var events uint64
	bound["sample"] = cmp.Or(bound["sample"], sample.Default)
	if bound["sample"] == sample.Default {
		if events, err = r.eventsReached(ctx, bound); err != nil {
			return 0, err
		}
	}
	return bindShare(bound, events, eventsSampled)
}

// eventsReached counts the block events that are read when all are looked at.
func (r *Reader) eventsReached(ctx context.Context, bound clickhouse.Parameters) (events uint64, err error) {
	err = r.query(ctx, `SELECT sum(blocks) FROM batches WHERE `+inReach, bound, func(scan func(...any) error) error { return scan(&events) })
	return events, err
}

// bindShare binds of how many blocks one is looked at; as many as give so many events, if it is not said.
func bindShare(bound clickhouse.Parameters, events, most uint64) (uint64, error) {
	share, err := strconv.ParseUint(bound["sample"], 10, 32)
	if err != nil {
		return 0, err
	}
	if share == 0 {
		share = max(events/most, 1)
	}
	bound["share"] = strconv.FormatUint(share, 10)
	bound["below"] = strconv.FormatUint(math.MaxUint64/share, 10)
	return share, nil
}

// weigh says that the answer is of a sample where a record stands for more than itself.
func (a *Answer) weigh(column string) {
	at := slices.IndexFunc(a.Columns, func(c Column) bool { return c.Name == column })
	if at < 0 {
		return
	}
	for _, row := range a.Rows {
		if n, ok := row[at].(uint32); ok && n > 1 {
			a.Exactness = "sampled"
			a.Notes = append(a.Notes, fmt.Sprintf("one lookup in %d is told, and numbers are times as many", n))
			return
		}
	}
}
