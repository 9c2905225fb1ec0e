// Package curve protects ZeroMQ sockets whose two ends are ours: the files that hold their keys, the options that sockets
// need, who of the clients is let in, and words for handshakes that fail. The cryptography is libzmq's own CURVE.
package curve

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/pebbe/zmq4"

	"kvstrata/secret"
)

// Keys are what one end of a connection has. A publisher's end serves, a subscriber's asks.
type Keys struct {
	Public string   // of this end; follows from Secret
	Secret string   // of this end
	Server string   // of a subscriber: the publisher's public key
	Allow  []string // of a publisher: the public keys that are let in; empty = whoever knows this end's public key
}

const (
	keyLength = 40 // characters of a key, in ZeroMQ's Z85
	z85       = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)

// Parse reads a file of keys: name = key a line; blank lines and lines that begin with # are skipped. The names are
// secret-key, public-key, server-key, and allow, which may be repeated. No error holds a key.
func Parse(text []byte) (*Keys, error) {
	k := new(Keys)
	var errs []error
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		name, key, ok := strings.Cut(line, "=")
		name, key = strings.TrimSpace(name), strings.TrimSpace(key)
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("line %d: want name = key", n))
		case !valid(key):
			errs = append(errs, fmt.Errorf("line %d: %s: want %d characters of Z85", n, known(name), keyLength))
		case name == "allow":
			k.Allow = append(k.Allow, key)
		default:
			if err := k.set(name, key); err != nil {
				errs = append(errs, fmt.Errorf("line %d: %w", n, err))
			}
		}
	}
	errs = append(errs, lines.Err())
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return k, k.complete()
}

func (k *Keys) set(name, key string) error {
	field := map[string]*string{"secret-key": &k.Secret, "public-key": &k.Public, "server-key": &k.Server}[name]
	switch {
	case field == nil:
		return errors.New("the name is unknown; known are secret-key, public-key, server-key and allow")
	case *field != "":
		return fmt.Errorf("%s is given twice", name)
	}
	*field = key
	return nil
}

// complete derives the public key, or checks it.
func (k *Keys) complete() error {
	if k.Secret == "" {
		return errors.New("secret-key is missing")
	}
	public, err := zmq4.AuthCurvePublic(k.Secret)
	if err != nil {
		return fmt.Errorf("libzmq was built without CURVE, or the secret-key is none: %w", err)
	}
	if k.Public != "" && k.Public != public {
		return errors.New("public-key does not belong to secret-key")
	}
	k.Public = public
	return nil
}

// known returns a name that may be repeated in an error: what is none of ours could be a part of a key.
func known(name string) string {
	switch name {
	case "secret-key", "public-key", "server-key", "allow":
		return name
	default:
		return "its name is unknown, and its key"
	}
}

func valid(key string) bool {
	return len(key) == keyLength && strings.Trim(key, z85) == ""
}

// ReadPublisher reads the keys of a publisher's end.
func ReadPublisher(path string) (*Keys, error) {
	k, err := read(path)
	if err == nil && k.Server != "" {
		return nil, fmt.Errorf("keys in %s: server-key is a subscriber's; was its file meant?", path)
	}
	return k, err
}

// ReadSubscriber reads the keys of a subscriber's end.
func ReadSubscriber(path string) (*Keys, error) {
	k, err := read(path)
	switch {
	case err != nil:
		return nil, err
	case k.Server == "":
		return nil, fmt.Errorf("keys in %s: server-key is missing: the public key of whom it connects to", path)
	case len(k.Allow) > 0:
		return nil, fmt.Errorf("keys in %s: allow is a publisher's; was its file meant?", path)
	}
	return k, nil
}

func read(path string) (*Keys, error) {
	text, err := secret.ReadFile(path, "keys")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read keys: %w; kvstrata curve-keys makes them", err)
	case err != nil:
		return nil, fmt.Errorf("read keys: %w", err)
	}
	k, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("keys in %s: %w", path, err)
	}
	return k, nil
}

// Generate makes keys for a publisher and for a subscriber that it lets in.
func Generate() (publisher, subscriber *Keys, err error) {
	publisher, subscriber = new(Keys), new(Keys)
	for _, k := range []*Keys{publisher, subscriber} {
		if k.Public, k.Secret, err = zmq4.NewCurveKeypair(); err != nil {
			return nil, nil, fmt.Errorf("make CURVE keys: %w", err)
		}
	}
	publisher.Allow, subscriber.Server = []string{subscriber.Public}, publisher.Public
	return publisher, subscriber, nil
}

// Text writes the keys as Parse reads them.
func (k *Keys) Text() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "public-key = %s\nsecret-key = %s\n", k.Public, k.Secret)
	if k.Server != "" {
		fmt.Fprintf(&b, "server-key = %s\n", k.Server)
	}
	for _, key := range k.Allow {
		fmt.Fprintf(&b, "allow = %s\n", key)
	}
	return b.Bytes()
}

// Connect gives the keys to a socket that will connect.
func (k *Keys) Connect(s *zmq4.Socket) error {
	if err := errors.Join(s.SetCurveServerkey(k.Server), s.SetCurvePublickey(k.Public), s.SetCurveSecretkey(k.Secret)); err != nil {
		return fmt.Errorf("set CURVE keys: %w; is libzmq built with CURVE?", err)
	}
	return nil
}

// Bind gives the keys to a socket that will bind. Where Allow names keys, its context needs a [Guard].
func (k *Keys) Bind(s *zmq4.Socket) error {
	err := errors.Join(s.SetCurveServer(1), s.SetCurveSecretkey(k.Secret))
	if err == nil && len(k.Allow) > 0 {
		err = s.SetZapDomain(zapDomain)
	}
	if err != nil {
		return fmt.Errorf("set CURVE keys: %w; is libzmq built with CURVE?", err)
	}
	return nil
}

// FailedEvents are the events of a socket's monitor that tell of a handshake which failed.
const FailedEvents = zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq4.EVENT_HANDSHAKE_FAILED_AUTH

// Values of EVENT_HANDSHAKE_FAILED_PROTOCOL.
const (
	cryptographic     = 0x11000001
	mechanismMismatch = 0x11000002
)

// HungUp is what [Refused] says where libzmq knows no reason: the other end closed the connection.
const HungUp = "CURVE handshake refused: the other end hangs up; is server-key its public key?"

// Refused returns what a monitor's event says of a handshake; empty where it did not fail.
func Refused(event zmq4.Event, value int) string {
	switch {
	case event&FailedEvents == 0:
		return ""
	case event == zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
		return HungUp
	case event == zmq4.EVENT_HANDSHAKE_FAILED_AUTH:
		return "CURVE handshake refused: this end's public key is not among those that the other end allows"
	case value == mechanismMismatch:
		return "CURVE handshake refused: one end has keys, the other has none"
	case value == cryptographic:
		return "CURVE handshake refused: the keys of the two ends do not fit"
	default:
		return "handshake refused: the other end does not speak ZeroMQ as this one does"
	}
}
