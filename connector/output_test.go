package connector_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kvstrata/connector"
)

// sum is metadata that adds up.
type sum int

func (s sum) Aggregate(other connector.WorkerMetadata) connector.WorkerMetadata {
	return s + other.(sum)
}

func TestAggregator(t *testing.T) {
	type step struct {
		ranks []*connector.Output
		want  connector.Output
	}
	for _, test := range []struct {
		name            string
		ranks, finished int
		steps           []step
	}{
		{"a request is finished when every rank says so", 2, 0, []step{
			{[]*connector.Output{{FinishedSending: []string{"a"}}, nil}, connector.Output{}},
			{
				[]*connector.Output{{FinishedReceiving: []string{"b"}}, {FinishedSending: []string{"a"}, FinishedReceiving: []string{"b"}}},
				connector.Output{FinishedSending: []string{"a"}, FinishedReceiving: []string{"b"}},
			},
			{[]*connector.Output{{FinishedSending: []string{"a"}}, {FinishedSending: []string{"a"}}}, connector.Output{FinishedSending: []string{"a"}}},
		}},
		{"a failure is held back until the request is finished", 2, 0, []step{
			{[]*connector.Output{{FinishedReceiving: []string{"a"}, FailedReceiving: []string{"a"}, InvalidBlocks: []int{4, 2}}, nil}, connector.Output{InvalidBlocks: []int{2, 4}}},
			{[]*connector.Output{nil, {FinishedReceiving: []string{"a"}, InvalidBlocks: []int{2}}}, connector.Output{FinishedReceiving: []string{"a"}, FailedReceiving: []string{"a"}, InvalidBlocks: []int{2}}},
			{[]*connector.Output{{FinishedReceiving: []string{"a"}}, {FinishedReceiving: []string{"a"}}}, connector.Output{FinishedReceiving: []string{"a"}}},
		}},
		{"fewer reports than ranks", 4, 1, []step{
			{[]*connector.Output{nil, {FinishedSending: []string{"a"}}, nil, nil}, connector.Output{FinishedSending: []string{"a"}}},
		}},
		{"a worker changes how many reports are expected", 2, 0, []step{
			{[]*connector.Output{{ExpectedFinished: 3}, nil}, connector.Output{ExpectedFinished: 3}},
			{[]*connector.Output{{FinishedSending: []string{"a"}}, {FinishedSending: []string{"a"}}}, connector.Output{}},
			{[]*connector.Output{{FinishedSending: []string{"a"}}, nil}, connector.Output{FinishedSending: []string{"a"}}},
		}},
		{"metadata and statistics are pooled", 2, 0, []step{
			{
				[]*connector.Output{
					{Metadata: sum(1), Stats: &connector.Stats{Transfers: []connector.Transfer{{Bytes: 5}}, ExpiredRequests: 1}},
					{Metadata: sum(2), Stats: &connector.Stats{Transfers: []connector.Transfer{{Bytes: 7}}, FailedTransfers: 2}},
				},
				connector.Output{Metadata: sum(3), Stats: &connector.Stats{
					Transfers: []connector.Transfer{{Bytes: 5}, {Bytes: 7}}, Ranks: 2, ExpiredRequests: 1, FailedTransfers: 2,
				}},
			},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := connector.NewAggregator(test.ranks, test.finished)
			for i, s := range test.steps {
				got := a.Aggregate(s.ranks)
				if diff := cmp.Diff(s.want, got, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("step %d (-want +got):\n%s", i, diff)
				}
			}
			if a.Pending() != 0 {
				t.Errorf("%d requests are pending", a.Pending())
			}
		})
	}
}

// With several ranks a mean is of one rank's transfer, and says so.
func TestSummaryTellsPooledFromPerRank(t *testing.T) {
	var all connector.Stats
	for range 4 {
		all.Pool(&connector.Stats{Transfers: []connector.Transfer{{Duration: time.Second, Post: time.Millisecond, Bytes: 1000, Descriptors: 4}}})
	}
	got := all.Summarize()
	want := connector.Summary{
		Ranks: 4, Transfers: 4, Bytes: 4000, Descriptors: 16, BytesPerDescriptor: 250, MeanRankDuration: time.Second,
		P90RankDuration: time.Second, MeanRankPost: time.Millisecond, P90RankPost: time.Millisecond, MeanRankBytes: 1000,
		MeanRankBytesASecond: 1000,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	var nothing connector.Stats
	if s := nothing.Summarize(); s.Transfers != 0 || s.MeanRankBytesASecond != 0 || !nothing.Empty() {
		t.Errorf("%+v", s)
	}
	later := connector.Stats{Ranks: 4, FailedTransfers: 1}
	all.Extend(&later)
	if all.Ranks != 4 || all.FailedTransfers != 1 {
		t.Errorf("another interval: %+v", all)
	}
}

func TestLeases(t *testing.T) {
	now := time.Unix(1000, 0)
	at := func(s int) time.Time { return now.Add(time.Duration(s) * time.Second) }
	l := connector.NewLeases(connector.DefaultLeaseConfig())
	for _, id := range []string{"a", "b", "c"} {
		if until := l.Hold(id, now); !until.Equal(at(30)) {
			t.Errorf("%s until %v", id, until)
		}
	}
	l.Beat([]string{"a", "no such"}, at(5)) // to 25 s: no sooner than it was
	l.Beat([]string{"b"}, at(25))           // to 45 s
	if next, ok := l.Next(); !ok || !next.Equal(at(30)) {
		t.Errorf("next ends %v", next)
	}
	if !l.Release("c") || l.Release("c") {
		t.Error("c is released once")
	}
	if diff := cmp.Diff([]string{"a"}, l.Expire(at(30))); diff != "" {
		t.Error(diff)
	}
	if got := l.Expire(at(44)); got != nil || l.Len() != 1 {
		t.Errorf("%v, %d left", got, l.Len())
	}
	if diff := cmp.Diff([]string{"b"}, l.Expire(at(45))); diff != "" || l.Expired() != 2 {
		t.Error(diff, l.Expired())
	}
	if _, ok := l.Next(); ok {
		t.Error("there is no next")
	}
	l.Beat([]string{"b"}, at(46))
	if l.Len() != 0 {
		t.Error("a heartbeat revived a lease")
	}
	if err := (connector.LeaseConfig{}).Validate(); err == nil {
		t.Error("no duration, and no error")
	}
	if c := connector.DefaultLeaseConfig(); c.Validate() != nil || c.Extension != 20*time.Second || c.Heartbeat != 5*time.Second {
		t.Errorf("%+v", c)
	}
}

// Ranks end in different steps: what they moved is of all of them nevertheless.
func TestStatisticsAreOfAllRanks(t *testing.T) {
	a := connector.NewAggregator(2, 0)
	one := &connector.Output{Stats: &connector.Stats{Ranks: 1, Transfers: []connector.Transfer{{Duration: time.Second, Bytes: 1}}}}
	var sum connector.Stats
	for _, outputs := range [][]*connector.Output{{one, nil}, {nil, one}} {
		out := a.Aggregate(outputs)
		sum.Extend(out.Stats)
	}
	if s := sum.Summarize(); s.Ranks != 2 || s.Transfers != 2 {
		t.Errorf("%d transfers of %d ranks, want 2 of 2", s.Transfers, s.Ranks)
	}
}
