package event

import (
	"kvstrata/event/eventpb"

	"google.golang.org/protobuf/proto"
)

// Asker is who asked how much of a prompt is cached.
type Asker uint8

// The askers.
const (
	AskerIndex     Asker = 1 + iota // the prefix index, on behalf of whoever asked it: what is expected
	AskerRouter                     // a router, of the engine that it chose
	AskerConnector                  // an engine that is to compute the prompt, through its connector: what was there
)

var askerNames = []string{AskerIndex: "index", AskerRouter: "router", AskerConnector: "connector"}

func (a Asker) String() string { return enumString(askerNames, "Asker", a) }

// Lookup is a record of kind `lookup`: one question of how much of a prompt is cached, and its answer.
type Lookup struct {
	// Source is the engine that the prompt went to; of the index, which chooses none, the one with the most of it. Without an instance: none.
	Source Source
	Asker  Asker
	Time   Time // when it was answered, by the asker's clock

	Request string // empty = not told, as the next two
	Session string
	Tenant  string

	OneIn     uint32 // of lookups like it, one in so many is told
	BlockSize uint32 // tokens a block; 0 = unknown
	Tokens    uint64 // asked for
	Prefix    PrefixHash
	Shares    []Share // what of it the engine has, each token in the warmest tier
	Holders   uint32  // engines that have a part of it, as far as the asker knows
	Longest   uint64  // tokens that the engine with the most of them has
}

// Share is what one tier serves of a lookup.
type Share struct {
	Tier   Tier // External where it is not known which
	Tokens uint64
}

// RequestEnd is how a request ended.
type RequestEnd uint8

// The ends.
const (
	EndStopped   RequestEnd = 1 + iota // by itself
	EndLength                          // at the length that was asked for
	EndAborted                         // by its client
	EndLoadError                       // because blocks could not be loaded
)

var endNames = []string{EndStopped: "stopped", EndLength: "length", EndAborted: "aborted", EndLoadError: "load_error"}

func (e RequestEnd) String() string { return enumString(endNames, "RequestEnd", e) }

// Request is a record of kind `lookup`: one request that an engine is done with.
type Request struct {
	Source   Source
	Time     Time // when it ended, by the engine's clock
	Request  string
	Session  string // empty = not told, as the next
	Tenant   string
	Prompt   uint64 // tokens
	Output   uint64 // tokens generated
	Cached   uint64 // tokens of the prompt that the engine had when it began
	External uint64 // tokens that were to be loaded from outside
	End      RequestEnd
}

// MarshalLookups returns the payload of a message of kind `lookup`; the engine stands in the subject. Texts are cut to 512
// bytes, and what is no UTF-8 in them is replaced.
func MarshalLookups(lookups []Lookup, requests []Request) ([]byte, error) {
	pb := &eventpb.Lookups{}
	for i := range lookups {
		l := &lookups[i]
		one := &eventpb.Lookup{
			Asker: uint32(l.Asker), Time: int64(l.Time), Request: recordText(l.Request), Session: recordText(l.Session), Tenant: recordText(l.Tenant),
			OneIn: l.OneIn, BlockSize: l.BlockSize, Tokens: l.Tokens, Prefix: uint64(l.Prefix), Holders: l.Holders, Longest: l.Longest,
		}
		for _, s := range l.Shares {
			one.Shares = append(one.Shares, &eventpb.Share{Tier: recordText(string(s.Tier)), Tokens: s.Tokens})
		}
		pb.Lookups = append(pb.Lookups, one)
	}
	for i := range requests {
		r := &requests[i]
		pb.Requests = append(pb.Requests, &eventpb.Request{
			Time: int64(r.Time), Request: recordText(r.Request), Session: recordText(r.Session), Tenant: recordText(r.Tenant), Prompt: r.Prompt,
			Output: r.Output, Cached: r.Cached, External: r.External, End: uint32(r.End),
		})
	}
	return proto.Marshal(pb)
}

// UnmarshalLookups reads what MarshalLookups wrote, for the engine that the subject names.
func UnmarshalLookups(payload []byte, source Source) ([]Lookup, []Request, error) {
	var pb eventpb.Lookups
	if err := proto.Unmarshal(payload, &pb); err != nil {
		return nil, nil, &WireError{Field: "lookups", Reason: err.Error()}
	}
	var lookups []Lookup
	for _, l := range pb.Lookups {
		one := Lookup{
			Source: source, Asker: Asker(l.GetAsker()), Time: Time(l.GetTime()), Request: l.GetRequest(), Session: l.GetSession(), Tenant: l.GetTenant(),
			OneIn: max(l.GetOneIn(), 1), BlockSize: l.GetBlockSize(), Tokens: l.GetTokens(), Prefix: PrefixHash(l.GetPrefix()),
			Holders: l.GetHolders(), Longest: l.GetLongest(),
		}
		for _, s := range l.GetShares() {
			one.Shares = append(one.Shares, Share{Tier: Tier(s.GetTier()), Tokens: s.GetTokens()})
		}
		lookups = append(lookups, one)
	}
	var requests []Request
	for _, r := range pb.Requests {
		requests = append(requests, Request{
			Source: source, Time: Time(r.GetTime()), Request: r.GetRequest(), Session: r.GetSession(), Tenant: r.GetTenant(), Prompt: r.GetPrompt(),
			Output: r.GetOutput(), Cached: r.GetCached(), External: r.GetExternal(), End: RequestEnd(r.GetEnd()),
		})
	}
	return lookups, requests, nil
}
