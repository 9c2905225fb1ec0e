package event

import "strings"

// Records are what is told beside events: of kind `transfer`, `lookup` or `gpu`. They change no resident set and have no sequence: what a full
// queue drops of them is counted, and not told.
type Records struct {
	Transfers []Transfer
	Lookups   []Lookup
	Requests  []Request
	Samples   []Sample
}

// Len returns how many there are.
func (r *Records) Len() int {
	return len(r.Transfers) + len(r.Lookups) + len(r.Requests) + len(r.Samples)
}

// maxRecordText bounds each text of a record, in bytes: they are what peers, servers and clients say.
const maxRecordText = 512

// recordText makes a text fit for a record, whatever was said.
func recordText(s string) string {
	if len(s) > maxRecordText {
		s = s[:maxRecordText]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
