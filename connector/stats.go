package connector

import (
	"fmt"
	"slices"
	"time"
)

// Transfer is one transfer of one rank.
type Transfer struct {
	Duration    time.Duration // from post to completion
	Post        time.Duration // of the call that posts it
	Bytes       uint64
	Descriptors uint64 // contiguous pieces
}

// Stats are the transfers of an interval (vLLM's KVConnectorStats for NIXL: transfer_duration, post_duration,
// bytes_transferred, num_descriptors, num_failed_transfers, num_failed_notifications, num_kv_expired_reqs). Every list has one
// entry a transfer of one rank. With R ranks a request is R transfers: sums over ranks are what moved, and a mean is of one
// rank's transfer, never of a request.
type Stats struct {
	Transfers []Transfer
	Ranks     int // ranks whose transfers are in it: 1 of a worker, their number once aggregated

	FailedTransfers     uint64
	FailedNotifications uint64
	ExpiredRequests     uint64 // whose blocks were freed when their lease ran out
}

// maxTransfers bounds the transfers of one interval that are kept one by one; totals of what is beyond are lost with it, so
// an interval is to be taken before.
const maxTransfers = 1 << 20

// Empty reports whether nothing happened.
func (s *Stats) Empty() bool {
	return len(s.Transfers) == 0 && s.FailedTransfers == 0 && s.FailedNotifications == 0 && s.ExpiredRequests == 0
}

// Pool adds another rank's of the same interval.
func (s *Stats) Pool(other *Stats) {
	ranks := s.Ranks + max(other.Ranks, 1)
	s.Extend(other)
	s.Ranks = ranks
}

// Extend adds those of another interval, of the same ranks or of fewer.
func (s *Stats) Extend(other *Stats) {
	room := max(0, maxTransfers-len(s.Transfers))
	s.Transfers = append(s.Transfers, other.Transfers[:min(len(other.Transfers), room)]...)
	s.Ranks = max(s.Ranks, other.Ranks, 1)
	s.FailedTransfers += other.FailedTransfers
	s.FailedNotifications += other.FailedNotifications
	s.ExpiredRequests += other.ExpiredRequests
}

// Summary is what an interval comes to. Names say over what a figure is taken.
type Summary struct {
	Ranks                int
	Transfers            int           // of ranks: with R ranks R a request
	Bytes                uint64        // pooled over ranks
	Descriptors          uint64        // pooled over ranks
	BytesPerDescriptor   float64       // pooled
	MeanRankDuration     time.Duration // of one rank's transfer
	P90RankDuration      time.Duration
	MeanRankPost         time.Duration
	P90RankPost          time.Duration
	MeanRankBytes        float64 // of one rank's transfer
	MeanRankBytesASecond float64 // a rank's bytes over its time: not what all ranks moved a second
	FailedTransfers      uint64
	FailedNotifications  uint64
	ExpiredRequests      uint64
}

// Summarize reduces the transfers.
func (s *Stats) Summarize() Summary {
	sum := Summary{
		Ranks: max(s.Ranks, 1), Transfers: len(s.Transfers), FailedTransfers: s.FailedTransfers, FailedNotifications: s.FailedNotifications,
		ExpiredRequests: s.ExpiredRequests,
	}
	if len(s.Transfers) == 0 {
		return sum
	}
	durations, posts := make([]time.Duration, 0, len(s.Transfers)), make([]time.Duration, 0, len(s.Transfers))
	var duration, post time.Duration
	for _, t := range s.Transfers {
		durations, posts = append(durations, t.Duration), append(posts, t.Post)
		duration, post = duration+t.Duration, post+t.Post
		sum.Bytes += t.Bytes
		sum.Descriptors += t.Descriptors
	}
	n := len(s.Transfers)
	sum.MeanRankDuration, sum.MeanRankPost = duration/time.Duration(n), post/time.Duration(n)
	sum.P90RankDuration, sum.P90RankPost = p90(durations), p90(posts)
	sum.MeanRankBytes = float64(sum.Bytes) / float64(n)
	if duration > 0 {
		sum.MeanRankBytesASecond = float64(sum.Bytes) / duration.Seconds()
	}
	if sum.Descriptors > 0 {
		sum.BytesPerDescriptor = float64(sum.Bytes) / float64(sum.Descriptors)
	}
	return sum
}

func p90(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[(len(d)-1)*9/10]
}

// String is one line for the log, each figure with what it is taken over.
func (s Summary) String() string {
	return fmt.Sprintf("%d transfers of %d ranks, %d bytes in %d descriptors over all ranks (%.0f bytes each); one rank's transfer: mean %v, p90 %v, "+
		"%.0f bytes, %.3g GB/s; post: mean %v, p90 %v; failed %d, notifications failed %d, leases expired %d",
		s.Transfers, s.Ranks, s.Bytes, s.Descriptors, s.BytesPerDescriptor, s.MeanRankDuration, s.P90RankDuration, s.MeanRankBytes,
		s.MeanRankBytesASecond/1e9, s.MeanRankPost, s.P90RankPost, s.FailedTransfers, s.FailedNotifications, s.ExpiredRequests)
}
