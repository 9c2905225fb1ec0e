package bus_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"kvstrata/bus"
	"kvstrata/certtest"
	"kvstrata/logtest"
	"kvstrata/porttest"
)

// file writes a file of the test's.
func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// nkey makes a user's key.
func nkey(t *testing.T) (seed, public string) {
	t.Helper()
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	text, err := pair.Seed()
	if err != nil {
		t.Fatal(err)
	}
	public, err = pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return string(text), public
}

// Every kind of client comes to every kind of embedded server, and so does the server's own process.
func TestWhoMayConnect(t *testing.T) {
	seed, public := nkey(t)
	otherSeed, _ := nkey(t)
	ca, strangers := certtest.New(t), certtest.New(t)
	cert, key := ca.Pair(t, "127.0.0.1")
	named, namedKey := ca.Pair(t, "nats.test")
	strange, strangeKey := strangers.Pair(t, "127.0.0.1")

	user := bus.Identity{User: "kv", Password: "sesame and more"}
	type client struct {
		refusal string // what it is told; empty = it is let in
		bus.Config
	}
	for _, server := range []struct {
		name    string
		id      bus.Identity
		guarded bool
		clients []client
	}{
		{"open", bus.Identity{}, false, []client{
			{"", bus.Config{}},
			{"", bus.Config{Identity: user}},
		}},
		{"user", user, true, []client{
			{"", bus.Config{Identity: user}},
			{"", bus.Config{Identity: bus.Identity{User: "kv", PasswordFile: file(t, "sesame and more\nand a note\n")}}},
			{"Authorization Violation", bus.Config{}},
			{"Authorization Violation", bus.Config{Identity: bus.Identity{User: "kv", Password: "sesame"}}},
			{"Authorization Violation", bus.Config{Identity: bus.Identity{User: "other", Password: "sesame and more"}}},
			{"Authorization Violation", bus.Config{Identity: bus.Identity{NKey: file(t, seed)}}},
		}},
		{"seed", bus.Identity{NKey: file(t, seed+"\n")}, true, []client{
			{"", bus.Config{Identity: bus.Identity{NKey: file(t, seed)}}},
			{"Authorization Violation", bus.Config{}},
			{"Authorization Violation", bus.Config{Identity: bus.Identity{NKey: file(t, otherSeed)}}},
		}},
		{"public key", bus.Identity{NKey: file(t, "# who may come\n"+public+"\n")}, true, []client{
			{"", bus.Config{Identity: bus.Identity{NKey: file(t, seed)}}},
			{"Authorization Violation", bus.Config{Identity: bus.Identity{NKey: file(t, otherSeed)}}},
		}},
		{"TLS", bus.Identity{Cert: cert, Key: key}, false, []client{
			{"", bus.Config{Identity: bus.Identity{CA: ca.File}}},
			{"unknown authority", bus.Config{Identity: bus.Identity{CA: strangers.File}}},
			{"unknown authority", bus.Config{}},
			{"wanted to match nats.test", bus.Config{Identity: bus.Identity{CA: ca.File}, ServerName: "nats.test"}},
		}},
		{"TLS under a name", bus.Identity{User: user.User, Password: user.Password, Cert: named, Key: namedKey}, true, []client{
			{"", bus.Config{Identity: bus.Identity{User: user.User, Password: user.Password, CA: ca.File}, ServerName: "nats.test"}},
			{"doesn't contain any IP", bus.Config{Identity: bus.Identity{CA: ca.File}}},
			{"Authorization Violation", bus.Config{Identity: bus.Identity{CA: ca.File}, ServerName: "nats.test"}},
		}},
		{"TLS of both", bus.Identity{Cert: cert, Key: key, CA: ca.File}, true, []client{
			{"", bus.Config{Identity: bus.Identity{CA: ca.File, Cert: cert, Key: key}}},
			// The server hangs up in the handshake: a client can't tell that from a server that is not ready.
			{"context deadline exceeded", bus.Config{Identity: bus.Identity{CA: ca.File}}},
			{"context deadline exceeded", bus.Config{Identity: bus.Identity{CA: ca.File, Cert: strange, Key: strangeKey}}},
		}},
		{"no TLS", bus.Identity{}, false, []client{
			{"secure connection not available", bus.Config{Identity: bus.Identity{CA: ca.File}}},
		}},
	} {
		t.Run(server.name, func(t *testing.T) {
			cfg := bus.DefaultServerConfig()
			cfg.Dir, cfg.Identity = t.TempDir(), server.id
			if cfg.Guarded() != server.guarded {
				t.Errorf("guarded: %v", cfg.Guarded())
			}
			srv, err := bus.StartServer(cfg, quiet())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(srv.Shutdown)
			own := bus.DefaultConfig()
			own.URL, own.Identity = srv.URL(), server.id
			b, err := bus.Dial(t.Context(), own, "own", quiet(), bus.InProcess(srv))
			if err != nil {
				t.Fatalf("its own process: %v", err)
			}
			t.Cleanup(b.Close)
			for _, client := range server.clients {
				refusal := client.refusal
				cfg := bus.DefaultConfig()
				cfg.URL, cfg.Identity, cfg.ServerName = srv.URL(), client.Identity, client.ServerName
				wait := 20 * time.Second
				if strings.Contains(refusal, "deadline") {
					wait = time.Second
				}
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				b, err := bus.Attach(ctx, cfg, "client", quiet())
				cancel()
				if err == nil {
					b.Close()
				}
				switch {
				case refusal == "" && err != nil:
					t.Errorf("refused: %v", err)
				case refusal != "" && (err == nil || !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(refusal))):
					t.Errorf("%v, want %q", err, refusal)
				case err != nil && strings.Contains(err.Error(), "sesame"):
					t.Errorf("the error holds the password: %v", err)
				}
			}
		})
	}
}

// What is replaced in files counts from the next connection on.
func TestPasswordIsReadAtEachConnection(t *testing.T) {
	path := file(t, "the first password")
	cfg := bus.DefaultServerConfig()
	cfg.Dir, cfg.Port, cfg.Identity = t.TempDir(), porttest.Port(t), bus.Identity{User: "kv", PasswordFile: path}
	srv, err := bus.StartServer(cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	client := bus.DefaultConfig()
	client.URL, client.Identity = srv.URL(), cfg.Identity
	var log logtest.Buffer
	b, err := bus.Attach(t.Context(), client, "client", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	srv.Shutdown()
	if err := os.WriteFile(path, []byte("the second password"), 0o600); err != nil {
		t.Fatal(err)
	}
	if srv, err = bus.StartServer(cfg, quiet()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	for deadline := time.Now().Add(20 * time.Second); !b.Connected() || b.Reconnects() == 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not come back")
		}
	}
	b.Close()
	if text := log.String(); strings.Contains(text, "first password") || strings.Contains(text, "second password") {
		t.Errorf("the log holds a password:\n%s", log.String())
	}
}

func TestBadIdentities(t *testing.T) {
	seed, _ := nkey(t)
	for _, test := range []struct {
		name  string
		cfg   bus.Config
		wants []string
	}{
		{"a user without a password", bus.Config{Identity: bus.Identity{User: "kv"}}, []string{"--nats-user kv: has no password", "KVSTRATA_NATS_PASSWORD"}},
		{"a password without a user", bus.Config{Identity: bus.Identity{Password: "sesame"}}, []string{"KVSTRATA_NATS_PASSWORD: is nobody's password"}},
		{"a file without a user", bus.Config{Identity: bus.Identity{PasswordFile: "f"}}, []string{"--nats-password-file: is nobody's"}},
		{"two passwords", bus.Config{Identity: bus.Identity{User: "kv", Password: "sesame", PasswordFile: "f"}}, []string{"want one of them"}},
		{
			"everything",
			bus.Config{URL: "nats://kv:sesame@host", Credentials: "c", Identity: bus.Identity{User: "kv", NKey: "n", Cert: "x"}},
			[]string{"--nats: holds a user", "--nats-user, --nats-nkey, --nats-creds", "--nats-cert, --nats-key", "--nats-user kv: has no password"},
		},
	} {
		cfg := bus.DefaultConfig()
		cfg.Identity, cfg.Credentials = test.cfg.Identity, test.cfg.Credentials
		if test.cfg.URL != "" {
			cfg.URL = test.cfg.URL
		}
		err := cfg.Validate()
		for _, want := range test.wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", test.name, err, want)
			}
		}
		if err != nil && strings.Contains(err.Error(), "sesame") {
			t.Errorf("%s: the error holds the password", test.name)
		}
	}
	for want, id := range map[string]bus.Identity{
		"--nats-password-file: open":    {User: "kv", PasswordFile: "/no/such"},
		"its first line is empty":       {User: "kv", PasswordFile: file(t, "\nsesame")},
		"holds neither a user's seed":   {NKey: file(t, "hello")},
		"--nats-nkey: open":             {NKey: "/no/such"},
		"a seed in it":                  {NKey: file(t, seed[:20])},
		"--nats-cert, --nats-key: open": {Cert: "/no/such", Key: "/no/such"},
	} {
		cfg := bus.DefaultServerConfig()
		cfg.Dir, cfg.Identity = t.TempDir(), id
		if _, err := bus.StartServer(cfg, quiet()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("server: %v, want %q", err, want)
		}
		client := bus.DefaultConfig()
		client.Identity = id
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := bus.Attach(ctx, client, "client", quiet())
		cancel()
		if err == nil {
			t.Errorf("client: %+v is taken", id)
		}
	}
	client := bus.DefaultConfig()
	client.Credentials = "/no/such"
	if _, err := bus.Attach(t.Context(), client, "client", quiet()); err == nil || !strings.Contains(err.Error(), "--nats-creds") {
		t.Errorf("%v", err)
	}
}

func TestSecretsDoNotPrint(t *testing.T) {
	id := bus.Identity{User: "kv", Password: "sesame"}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "password", id.Password)
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %s", id, id, id, id.Password), log.String()} {
		if strings.Contains(text, "sesame") {
			t.Error(text)
		}
	}
}

// A credentials file logs in to a server whose users are signed by an operator.
func TestCredentialsFile(t *testing.T) {
	operator, account, user := signer(t, nkeys.CreateOperator), signer(t, nkeys.CreateAccount), signer(t, nkeys.CreateUser)
	accountClaims := jwt.NewAccountClaims(account.public)
	accountJWT, err := accountClaims.Encode(operator.KeyPair)
	if err != nil {
		t.Fatal(err)
	}
	userJWT, err := jwt.NewUserClaims(user.public).Encode(account.KeyPair)
	if err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	creds, err := jwt.FormatUserConfig(userJWT, seed)
	if err != nil {
		t.Fatal(err)
	}
	resolver := &natsserver.MemAccResolver{}
	if err := resolver.Store(account.public, accountJWT); err != nil {
		t.Fatal(err)
	}
	srv, err := natsserver.NewServer(&natsserver.Options{
		Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoSigs: true, NoLog: true, TrustedKeys: []string{operator.public}, AccountResolver: resolver,
	})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	t.Cleanup(func() {
		srv.Shutdown()
		srv.WaitForShutdown()
	})
	if !srv.ReadyForConnections(20 * time.Second) {
		t.Fatal("the server does not start")
	}
	cfg := bus.DefaultConfig()
	cfg.URL = srv.ClientURL()
	if _, err := bus.Attach(t.Context(), cfg, "nobody", quiet()); err == nil || !strings.Contains(err.Error(), "--nats-creds") {
		t.Errorf("nobody: %v", err)
	}
	cfg.Credentials = file(t, string(creds))
	b, err := bus.Attach(t.Context(), cfg, "user", quiet())
	if err != nil {
		t.Fatal(err)
	}
	b.Close()
}

type keyPair struct {
	nkeys.KeyPair
	public string
}

func signer(t *testing.T, create func() (nkeys.KeyPair, error)) keyPair {
	t.Helper()
	pair, err := create()
	if err != nil {
		t.Fatal(err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return keyPair{pair, public}
}

// A password that goes to another machine without TLS is told of in one line. 0.0.0.0 is a name of this one that is not
// loopback's.
func TestAPasswordInTheClearIsToldOf(t *testing.T) {
	ca := certtest.New(t)
	cert, key := ca.Pair(t, "0.0.0.0")
	user := bus.Identity{User: "kv", Password: "sesame and more"}
	seed, _ := nkey(t)
	encrypted := user
	encrypted.Cert, encrypted.Key = cert, key
	overTLS := user
	overTLS.CA = ca.File
	for _, tt := range []struct {
		name           string
		server, client bus.Identity
		host           string
		warned         bool
	}{
		{"another machine", user, user, "0.0.0.0", true},
		{"loopback", user, user, "127.0.0.1", false},
		{"TLS", encrypted, overTLS, "0.0.0.0", false},
		{"a key", bus.Identity{NKey: file(t, seed)}, bus.Identity{NKey: file(t, seed)}, "0.0.0.0", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			srv, err := bus.StartServer(bus.ServerConfig{Dir: t.TempDir(), Host: "0.0.0.0", Port: -1, Identity: tt.server}, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			defer srv.Shutdown()
			cfg := bus.DefaultConfig()
			cfg.URL = "nats://" + tt.host + srv.URL()[strings.LastIndex(srv.URL(), ":"):]
			cfg.Identity = tt.client
			var said logtest.Buffer
			b, err := bus.Dial(t.Context(), cfg, "test", slog.New(slog.NewTextHandler(&said, nil)))
			if err != nil {
				t.Fatal(err)
			}
			b.Close()
			want := 0
			if tt.warned {
				want = 1
			}
			if got := strings.Count(said.String(), "in the clear"); got != want || strings.Contains(said.String(), "sesame") {
				t.Errorf("%s", said.String())
			}
		})
	}
}
