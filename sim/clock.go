package sim

import (
	"context"
	"time"

	"kvstrata/event"
)

// Clock is what engines' clocks show in a run: virtual time that runs at a speed.
type Clock struct {
	Began time.Time  // real
	Start event.Time // what the clocks showed then
	Speed float64    // virtual time over real time
}

// Now returns what the clocks show.
func (c Clock) Now() event.Time {
	return c.Start + event.Time(float64(time.Since(c.Began))*c.Speed)
}

// SleepUntil waits until the clocks show t; it returns false when ctx ended first.
func (c Clock) SleepUntil(ctx context.Context, t event.Time) bool {
	wait := time.Duration(float64(t-c.Now()) / c.Speed)
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
