package bus

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"kvstrata/secret"
)

// Secret is a password. It prints as a placeholder.
type Secret = secret.Text

// Identity is what one end of a NATS connection shows, and what it wants to see. Of a client, it is how it logs in. Of the
// embedded server, it is whom it lets in: nobody but them where it names any, and else everybody.
//
// Files are read again at each connection, so that what they hold can be replaced.
type Identity struct {
	User         string
	Password     Secret
	PasswordFile string // its first line; instead of Password
	// NKey is a file with a user's seed. The embedded server's may hold several, a line each, and public keys instead.
	NKey string
	// CA is a file of certificates in PEM that the other end's must come from. A client without one trusts the system's;
	// the embedded server wants a certificate of its clients only where it has one.
	CA string
	// Cert and Key are PEM files of this end's certificate.
	Cert, Key string
}

// validate reports every problem at once. PasswordVariable is what a person can set instead of a file.
func (i Identity) validate() []error {
	var errs []error
	switch {
	case i.Password != "" && i.PasswordFile != "":
		errs = append(errs, fmt.Errorf("--nats-password-file and %s: want one of them", PasswordVariable))
	case i.User != "" && i.Password == "" && i.PasswordFile == "":
		errs = append(errs, fmt.Errorf("--nats-user %s: has no password; give --nats-password-file or %s", i.User, PasswordVariable))
	case i.User == "" && i.Password != "":
		errs = append(errs, fmt.Errorf("%s: is nobody's password; give --nats-user", PasswordVariable))
	case i.User == "" && i.PasswordFile != "":
		errs = append(errs, errors.New("--nats-password-file: is nobody's password; give --nats-user"))
	}
	if (i.Cert == "") != (i.Key == "") {
		errs = append(errs, errors.New("--nats-cert, --nats-key: want both or none"))
	}
	return errs
}

// PasswordVariable is the environment variable that may hold the password of --nats-user.
const PasswordVariable = "KVSTRATA_NATS_PASSWORD"

// password reads it from where it lies.
func (i Identity) password() (string, error) {
	if i.PasswordFile == "" {
		return string(i.Password), nil
	}
	text, err := os.ReadFile(i.PasswordFile)
	if err != nil {
		return "", fmt.Errorf("--nats-password-file: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	if line = strings.TrimSuffix(line, "\r"); line == "" {
		return "", fmt.Errorf("--nats-password-file %s: its first line is empty", i.PasswordFile)
	}
	return line, nil
}

// roots reads the certificates of CA; nil without.
func (i Identity) roots() (*x509.CertPool, error) {
	if i.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(i.CA)
	if err != nil {
		return nil, fmt.Errorf("--nats-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--nats-ca %s: no certificate in it", i.CA)
	}
	return pool, nil
}

// pair reads this end's certificate.
func (i Identity) pair() (*tls.Certificate, error) {
	cert, err := tls.LoadX509KeyPair(i.Cert, i.Key)
	if err != nil {
		return nil, fmt.Errorf("--nats-cert, --nats-key: %w", err)
	}
	return &cert, nil
}

// clientOptions returns how a client logs in. What can't be read is told now, though it is read again each time.
func (c Config) clientOptions() ([]nats.Option, error) {
	var opts []nats.Option
	if c.User != "" {
		if _, err := c.password(); err != nil {
			return nil, err
		}
		opts = append(opts, nats.UserInfoHandler(func() (string, string) {
			password, _ := c.password() // the server refuses none
			return c.User, password
		}))
	}
	if c.NKey != "" {
		opt, err := nats.NkeyOptionFromSeed(c.NKey)
		if err != nil {
			return nil, fmt.Errorf("--nats-nkey %s: %w", c.NKey, err)
		}
		opts = append(opts, opt)
	}
	if c.Credentials != "" {
		if _, err := os.Stat(c.Credentials); err != nil {
			return nil, fmt.Errorf("--nats-creds: %w", err)
		}
		opts = append(opts, nats.UserCredentials(c.Credentials))
	}
	if c.CA == "" && c.Cert == "" && c.ServerName == "" {
		return opts, nil
	}
	if _, err := c.roots(); err != nil {
		return nil, err
	}
	opts = append(opts, nats.Secure(&tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.ServerName}))
	if c.CA != "" {
		opts = append(opts, nats.RootCAs(c.CA))
	}
	if c.Cert != "" {
		if _, err := c.pair(); err != nil {
			return nil, err
		}
		opts = append(opts, nats.ClientCert(c.Cert, c.Key))
	}
	return opts, nil
}

// inTheClear reports whether a password has gone to another machine without TLS, and to which.
func (c Config) inTheClear(conn *nats.Conn) (host string, ok bool) {
	at, err := url.Parse(conn.ConnectedUrl())
	if err != nil || at.Host == "" || c.User == "" {
		return "", false
	}
	// Asked for, or wanted by the server. The connection's own state is no use: nats.go reads it unlocked.
	if c.CA != "" || c.Cert != "" || c.ServerName != "" || at.Scheme == "tls" || at.Scheme == "wss" || conn.TLSRequired() {
		return "", false
	}
	ip := net.ParseIP(at.Hostname())
	return at.Host, at.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback())
}

// protect makes the embedded server let in nobody but whom the identity names, and returns the key of this process's own
// connections; nil where everybody may come.
func (i Identity) protect(opts *natsserver.Options) (own nkeys.KeyPair, err error) {
	if i.Cert != "" {
		if opts.TLSConfig, err = i.serverTLS(); err != nil {
			return nil, err
		}
		opts.TLS, opts.TLSVerify = true, i.CA != ""
	}
	if i.User == "" && i.NKey == "" {
		return nil, nil
	}
	if i.User != "" {
		password, err := i.password()
		if err != nil {
			return nil, err
		}
		opts.Users = []*natsserver.User{{Username: i.User, Password: password}}
	}
	if opts.Nkeys, err = i.nkeys(); err != nil {
		return nil, err
	}
	if own, err = nkeys.CreateUser(); err != nil {
		return nil, fmt.Errorf("make a key for this process: %w", err)
	}
	public, err := own.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("make a key for this process: %w", err)
	}
	opts.Nkeys = append(opts.Nkeys, &natsserver.NkeyUser{Nkey: public})
	return own, nil
}

// serverTLS returns how the embedded server speaks TLS. The certificate is read at each connection.
func (i Identity) serverTLS() (*tls.Config, error) {
	if _, err := i.pair(); err != nil {
		return nil, err
	}
	roots, err := i.roots()
	if err != nil {
		return nil, err
	}
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12, ClientCAs: roots,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.pair() },
	}
	if roots != nil {
		cfg.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return cfg, nil
}

// nkeys reads the users of the file, as the embedded server knows them.
func (i Identity) nkeys() ([]*natsserver.NkeyUser, error) {
	if i.NKey == "" {
		return nil, nil
	}
	text, err := os.ReadFile(i.NKey)
	if err != nil {
		return nil, fmt.Errorf("--nats-nkey: %w", err)
	}
	var users []*natsserver.NkeyUser
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		switch {
		case bytes.HasPrefix(line, []byte("SU")):
			pair, err := nkeys.FromSeed(line)
			if err != nil {
				return nil, fmt.Errorf("--nats-nkey %s: a seed in it: %w", i.NKey, err)
			}
			public, err := pair.PublicKey()
			if err != nil {
				return nil, fmt.Errorf("--nats-nkey %s: a seed in it: %w", i.NKey, err)
			}
			users = append(users, &natsserver.NkeyUser{Nkey: public})
		case nkeys.IsValidPublicUserKey(string(line)):
			users = append(users, &natsserver.NkeyUser{Nkey: string(line)})
		}
	}
	if len(users) == 0 {
		return nil, fmt.Errorf("--nats-nkey %s: holds neither a user's seed (SU…) nor a public key (U…)", i.NKey)
	}
	return users, nil
}
