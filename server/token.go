package server

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"kvstrata/secret"
)

// Secret is a token. It prints as a placeholder.
type Secret = secret.Text

const (
	// TokenVariable is the environment variable that may hold a token, of a server and of a client alike.
	TokenVariable = "KVSTRATA_TOKEN"

	minToken  = 16 // bytes: who can reach a server may try guesses at leisure
	maxTokens = 1000
)

// fingerprint stands for a token: it has one length, and compares in constant time.
type fingerprint [sha256.Size]byte

// ParseTokens reads a file of tokens: one a line; blank lines and lines that begin with # are skipped. Errors hold none.
func ParseTokens(text []byte) ([]Secret, error) {
	var all []Secret
	var errs []error
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		switch {
		case line == "" || line[0] == '#':
		case len(line) < minToken:
			errs = append(errs, fmt.Errorf("line %d: %d characters; want %d or more, as openssl rand -hex 24 makes them", n, len(line), minToken))
		case strings.ContainsFunc(line, func(r rune) bool { return r <= ' ' || r > '~' }):
			errs = append(errs, fmt.Errorf("line %d: want letters, digits and punctuation, without blanks", n))
		default:
			all = append(all, Secret(line))
		}
	}
	errs = append(errs, lines.Err())
	if len(all) > maxTokens {
		errs = append(errs, fmt.Errorf("%d tokens; want %d at most", len(all), maxTokens))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("no token in it")
	}
	return all, nil
}

// ReadTokens reads the tokens of a file.
func ReadTokens(path string) ([]Secret, error) {
	text, err := secret.ReadFile(path, "tokens")
	if err != nil {
		return nil, fmt.Errorf("--token-file: %w", err)
	}
	tokens, err := ParseTokens(text)
	if err != nil {
		return nil, fmt.Errorf("--token-file %s: %w", path, err)
	}
	return tokens, nil
}

// keyring is the tokens that let in. While its file can't be read, none of the file's does: what was taken back must not
// count because of a slip.
type keyring struct {
	fixed []fingerprint
	file  *watched[[]fingerprint] // nil without one
}

// newKeyring reads the tokens; nil without any.
func newKeyring(cfg Config, log *slog.Logger) (*keyring, error) {
	if cfg.TokenFile == "" && cfg.Token == "" {
		return nil, nil
	}
	k := new(keyring)
	if cfg.Token != "" {
		tokens, err := ParseTokens([]byte(cfg.Token))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", TokenVariable, err)
		}
		k.fixed = fingerprints(tokens)
	}
	if cfg.TokenFile != "" {
		var err error
		k.file, err = watch(log, func() ([]fingerprint, error) {
			tokens, err := ReadTokens(cfg.TokenFile)
			return fingerprints(tokens), err
		}, cfg.TokenFile)
		if err != nil {
			return nil, err
		}
	}
	return k, nil
}

func fingerprints(tokens []Secret) []fingerprint {
	all := make([]fingerprint, len(tokens))
	for i, t := range tokens {
		all[i] = sha256.Sum256([]byte(t))
	}
	return all
}

// present returns the tokens that count now.
func (k *keyring) present() []fingerprint {
	if k.file == nil {
		return k.fixed
	}
	fromFile, err := k.file.get()
	if err != nil {
		return k.fixed
	}
	return append(fromFile[:len(fromFile):len(fromFile)], k.fixed...)
}

// find returns which of the tokens it is. It takes as long wherever, and whether, it finds one.
func (k *keyring) find(token string) (fingerprint, bool) {
	asked := fingerprint(sha256.Sum256([]byte(token)))
	found := 0
	for _, known := range k.present() {
		found |= subtle.ConstantTimeCompare(asked[:], known[:])
	}
	return asked, found == 1
}

// admits reports whether a request shows a token, or, where sessions count, one that a token has opened.
func (k *keyring) admits(r *http.Request, now time.Time, sessions bool) bool {
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		_, ok := k.find(strings.TrimSpace(token))
		return ok
	}
	if !sessions {
		return false
	}
	cookie, err := r.Cookie(sessionCookie(r))
	return err == nil && k.admitsSession(cookie.Value, now)
}

const sessionTime = 12 * time.Hour

// sessionCookie returns the name of the cookie that holds a session. A browser sends a host's cookies to all its ports, so the
// port is in the name: servers of one host would take each other's place else. It is the port that the browser asks for, which
// may lead here from another.
func sessionCookie(r *http.Request) string {
	_, text, err := net.SplitHostPort(r.Host)
	port, portErr := strconv.ParseUint(text, 10, 16)
	if err != nil || portErr != nil {
		return "kvstrata"
	}
	return fmt.Sprintf("kvstrata-%d", port)
}

// newSession returns what stands for a token in a browser until then: its end, and a proof that only who knows the token
// could make. It ends with the token, too.
func newSession(token fingerprint, end time.Time) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(end.Unix()))
	return base64.RawURLEncoding.EncodeToString(append(b, sessionProof(token, b)...))
}

func sessionProof(token fingerprint, end []byte) []byte {
	mac := hmac.New(sha256.New, token[:])
	mac.Write([]byte("kvstrata session "))
	mac.Write(end)
	return mac.Sum(nil)
}

func (k *keyring) admitsSession(text string, now time.Time) bool {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) != 8+sha256.Size {
		return false
	}
	found := 0
	for _, known := range k.present() {
		found |= subtle.ConstantTimeCompare(sessionProof(known, b[:8]), b[8:])
	}
	return found == 1 && now.Before(time.Unix(int64(binary.BigEndian.Uint64(b)), 0))
}
