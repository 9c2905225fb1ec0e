package history

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"kvstrata/event"
)

// resets say why a CLEARED came.
var resets = map[string]string{
	event.ByEngine.String(): "the engine cleared its cache", event.ByResync.String(): "events were lost, and what was resident no longer known",
	newLife: newLife, restored: restored,
}

// summary tells a story in sentences.
func summary(s *Story, now time.Time) []string {
	if !s.Found {
		return []string{"Never seen: no event that is kept names this hash. It was never stored, or before what history keeps."}
	}
	ago := func(ms int64) string { return now.Sub(time.UnixMilli(ms)).Round(time.Second).String() + " ago" }
	var out []string
	counts := make(map[string]int)
	engines := make(map[string]bool)
	var stored, evicted, cleared *StoryLine
	var firstStored int64
	for i := range s.Events {
		l := &s.Events[i]
		if l.Op == "STORED" && l.Effect > 0 {
			if stored == nil {
				firstStored = l.Time
			}
			counts["stored"]++
			engines[l.Instance] = true
			stored = l
		}
		if l.Op == "EVICTED" && l.Effect < 0 {
			counts["evicted"]++
			evicted = l
		}
		if l.Op == "LOADED" {
			counts["loaded"]++
		}
		if l.Op == "CLEARED" {
			counts["cleared"]++
			cleared = l
		}
	}
	if len(s.Events) == 0 {
		out = append(out, "Nothing happened to it in that time.")
	}
	if stored != nil {
		out = append(out, fmt.Sprintf("Stored %s on %s, first %s, last %s on %s (%s).", times(counts["stored"]),
			plural(len(engines), "engine"), ago(firstStored), ago(stored.Time), stored.Instance, stored.Tier))
	}
	if counts["loaded"] > 0 {
		out = append(out, fmt.Sprintf("Loaded %s.", times(counts["loaded"])))
	}
	if evicted != nil {
		text := fmt.Sprintf("Evicted %s, last %s from %s (%s)", times(counts["evicted"]), ago(evicted.Time), evicted.Instance, evicted.Tier)
		if evicted.Age != nil {
			text += fmt.Sprintf(" after %s", time.Duration(*evicted.Age*float64(time.Second)).Round(time.Millisecond))
		}
		out = append(out, text+"; the engine tells no reason.")
	} else if len(s.Events) > 0 {
		out = append(out, "Not evicted in what is shown.")
	}
	if cleared != nil {
		out = append(out, fmt.Sprintf("Taken away by a reset %s, last %s on %s: %s.", times(counts["cleared"]), ago(cleared.Time), cleared.Instance,
			resets[cleared.Reason]))
	}
	if len(s.Resident) == 0 {
		out = append(out, "Resident nowhere now.")
	} else {
		var where []string
		for _, p := range s.Resident {
			where = append(where, fmt.Sprintf("%s (%s, %s)", p.Instance, p.Tier, plural(int(p.Copies), "copy")))
		}
		out = append(out, "Resident now on "+strings.Join(where, ", ")+".")
	}
	if s.Truncated {
		out = append(out, fmt.Sprintf("Only the newest %d events are shown, and counted here.", maxStory))
	}
	return out
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return strconv.Itoa(n) + " times"
}

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if base, ok := strings.CutSuffix(noun, "y"); ok {
		return fmt.Sprintf("%d %sies", n, base)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
