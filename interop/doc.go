// Package interop checks kvstrata against the real vLLM: its event publisher, event classes and decoder, unmodified, in
// each of the two releases whose wire forms differ. publish.py and subscribe.py drive them, README.md describes those;
// the tests drive the Python and, on our side, the real subscriber, NATS server, consumer, index, publisher and binary.
//
// LMCache's own cache server, clients of it and of Redis, and chunk hashes are run likewise, against package
// connector/lmcache.
//
// Dynamo's radix tree and hash functions are asked what they make of our hashes. Scripts write what these and other
// producers send into the test data of package subscriber.
//
// check.sh runs everything.
package interop
