package recovery

import (
	"fmt"
	"strings"

	"kvstrata/event"
)

// unproved is the reason of a source whose doubt no replay could end: what came next had the next sequence, so it is taken
// for the same life. Another life that has reached exactly that sequence can't be told from it without replay.
const unproved = "same life by sequence only: no replay proved it"

// standing is how complete what was applied of a life is.
type standing struct {
	unproved bool   // it may mix two lives
	missing  string // why something may be missing; empty when nothing is
}

// tell returns the state and the reason by which a standing is told.
func (s standing) tell() (event.State, string) {
	switch {
	case s.unproved && s.missing != "":
		return event.StatePartial, unproved + "; " + s.missing
	case s.unproved:
		return event.StatePartial, unproved
	case s.missing != "":
		return event.StatePartial, s.missing
	default:
		return event.StateLive, ""
	}
}

// standingOf reads a standing off what tell made of it: checkpoints and statuses have no field of their own for it.
func standingOf(state event.State, reason string) standing {
	if state == event.StateLive {
		return standing{}
	}
	missing, found := strings.CutPrefix(reason, unproved)
	return standing{unproved: found, missing: strings.TrimPrefix(missing, "; ")}
}

// beginning returns the standing of a life whose first known batch has a sequence; lives begin with another.
func beginning(known, first event.Seq) standing {
	if known > first {
		return standing{missing: fmt.Sprintf("first heard at sequence %d", known)}
	}
	return standing{}
}

// hole returns what is missing of a life that lost a range.
func hole(first, last event.Seq, reason string) string {
	return fmt.Sprintf("lost %d to %d: %s", first, last, reason)
}
