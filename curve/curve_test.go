package curve_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pebbe/zmq4"

	"kvstrata/curve"
)

func generate(t *testing.T) (publisher, subscriber *curve.Keys) {
	t.Helper()
	if !zmq4.HasCurve() {
		t.Fatal("libzmq has no CURVE: install one that was built with libsodium")
	}
	publisher, subscriber, err := curve.Generate()
	if err != nil {
		t.Fatal(err)
	}
	return publisher, subscriber
}

func TestFilesOfKeys(t *testing.T) {
	publisher, subscriber := generate(t)
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	pub, sub := write("publisher", publisher.Text()), write("subscriber", subscriber.Text())
	got, err := curve.ReadPublisher(pub)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(publisher, got); diff != "" {
		t.Error(diff)
	}
	if got, err = curve.ReadSubscriber(sub); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(subscriber, got); diff != "" {
		t.Error(diff)
	}
	for _, test := range []struct {
		name string
		read func(string) (*curve.Keys, error)
		path string
		want string
	}{
		{"a subscriber's as a publisher's", curve.ReadPublisher, sub, "server-key is a subscriber's"},
		{"a publisher's as a subscriber's", curve.ReadSubscriber, pub, "server-key is missing"},
		{"both", curve.ReadSubscriber, write("both", append(subscriber.Text(), "allow = "+publisher.Public...)), "allow is a publisher's"},
		{"no file", curve.ReadPublisher, filepath.Join(dir, "none"), "kvstrata curve-keys makes them"},
		{"a large file", curve.ReadPublisher, write("large", make([]byte, 2<<20)), "no file of keys"},
	} {
		if _, err := test.read(test.path); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
}

func TestParse(t *testing.T) {
	publisher, subscriber := generate(t)
	secret := "secret-key = " + publisher.Secret
	for _, test := range []struct{ name, text, want string }{
		{"comments and blanks", "# keys\n\n  " + secret + "  \n", ""},
		{"public key that fits", secret + "\npublic-key=" + publisher.Public, ""},
		{"public key of another", secret + "\npublic-key=" + subscriber.Public, "public-key does not belong to secret-key"},
		{"nothing", "", "secret-key is missing"},
		{"twice", secret + "\n" + secret, "line 2: secret-key is given twice"},
		{"unknown name", secret + "\nsecret = " + subscriber.Secret, "line 2: the name is unknown"},
		{"no name", "a word alone", "line 1: want name = key"},
		{"too short", "secret-key = " + subscriber.Secret[:39], "line 1: secret-key: want 40 characters of Z85"},
		{"no Z85", "allow = " + strings.Repeat("\"", 40), "line 1: allow: want 40 characters of Z85"},
		{"all at once", "allow = x\nserver-key = y", "line 2: server-key"},
	} {
		_, err := curve.Parse([]byte(test.text))
		switch {
		case test.want == "" && err != nil:
			t.Errorf("%s: %v", test.name, err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
		for _, key := range []string{publisher.Secret, subscriber.Secret[:20]} {
			if err != nil && strings.Contains(err.Error(), key) {
				t.Errorf("%s: the error holds a key", test.name)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	publisher, subscriber, err := curve.Generate()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(publisher.Text())
	f.Add(subscriber.Text())
	f.Add([]byte("secret-key"))
	f.Fuzz(func(t *testing.T, text []byte) {
		k, err := curve.Parse(text)
		if err != nil {
			return
		}
		again, err := curve.Parse(k.Text())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(k, again); diff != "" {
			t.Error(diff)
		}
	})
}

func TestRefused(t *testing.T) {
	for _, test := range []struct {
		event zmq4.Event
		value int
		want  string
	}{
		{zmq4.EVENT_CONNECTED, 0, ""},
		{zmq4.EVENT_DISCONNECTED, 0, ""},
		{zmq4.EVENT_HANDSHAKE_SUCCEEDED, 0, ""},
		{zmq4.EVENT_HANDSHAKE_FAILED_AUTH, 400, "among those that the other end allows"},
		{zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000002, "one end has keys, the other has none"},
		{zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000001, "do not fit"},
		{zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x10000001, "does not speak ZeroMQ"},
		{zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, "the other end hangs up"},
	} {
		got := curve.Refused(test.event, test.value)
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%v %#x: %q, want %q", test.event, test.value, got, test.want)
		}
	}
}
