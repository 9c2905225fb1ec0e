package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"

	"kvstrata/connector"
	"kvstrata/connector/tcp"
	"kvstrata/curve"
)

// insecureFlag is the only way past the rule for listeners.
type insecureFlag struct {
	Insecure bool `help:"Let everybody in at listeners that other machines reach and that ask for no token, user or key." env:"KVSTRATA_INSECURE"`
}

// entrance is a listener as its flags have it.
type entrance struct {
	flag    string
	address string // host:port, or a ZeroMQ endpoint
	guarded bool   // it asks who comes
	remedy  string // what guards it
}

// check is the rule for listeners, all of them: what other machines reach asks who comes, or --insecure says that it need
// not. All problems are told at once.
func (f insecureFlag) check(entrances ...entrance) error {
	var errs []error
	for _, e := range entrances {
		if f.Insecure || e.guarded || !reachable(e.address) {
			continue
		}
		errs = append(errs, fmt.Errorf("%s %s: other machines reach it, and it lets everybody in; give %s, or --insecure where something else keeps strangers out",
			e.flag, e.address, e.remedy))
	}
	if err := errors.Join(errs...); err != nil {
		return usagef("%w", err)
	}
	return nil
}

// reachable reports whether other machines can reach an address. What can't be told counts as if they did; what is no
// address is refused by whoever binds it.
func reachable(address string) bool {
	scheme, rest, ok := strings.Cut(address, "://")
	switch {
	case ok && scheme == "ipc":
		return false
	case ok:
		address = rest
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if ip := net.ParseIP(host); ip != nil {
		return !ip.IsLoopback()
	}
	if link, err := net.InterfaceByName(host); ok && err == nil { // ZeroMQ takes those
		return link.Flags&net.FlagLoopback == 0
	}
	found, err := net.LookupIP(host)
	if err != nil || len(found) == 0 {
		return true
	}
	for _, ip := range found {
		if !ip.IsLoopback() {
			return true
		}
	}
	return false
}

// entrances are the API, the admin listener and the gRPC service.
func (f listenFlags) entrances() []entrance {
	guarded := f.config().Guarded()
	return []entrance{
		{"--listen", f.Listen, guarded, "--token-file"},
		{"--admin", f.Admin, guarded, "--token-file"},
		{"--grpc", f.GRPC, guarded, "--token-file"},
	}
}

// entrance is the embedded NATS server.
func (f natsLogin) entrance(listen string) (entrance, error) {
	cfg, err := f.server(listen)
	return entrance{"--nats-listen", listen, cfg.Guarded(), "--nats-user or --nats-nkey"}, err
}

// entrances are a simulated engine's sockets.
func (s simSpec) entrances() ([]entrance, error) {
	guarded := false
	if s.Curve != "" {
		keys, err := curve.ReadPublisher(s.Curve)
		if err != nil {
			return nil, usagef("--curve: %w", err)
		}
		guarded = len(keys.Allow) > 0
	}
	const remedy = "--curve with keys that it allows"
	all := []entrance{{"--events", s.Events, guarded, remedy}, {"--replay", s.Replay, guarded, remedy}}
	transfer, err := transferEntrances(s.Transfer)
	return append(all, transfer...), err
}

// transferEntrances are where a connector waits for its peers.
func transferEntrances(transfer string) ([]entrance, error) {
	if transfer == "" {
		return nil, nil
	}
	cfg, err := connector.ParseConfig([]byte(transfer))
	if err != nil {
		return nil, usagef("%w", err)
	}
	if cfg.Connector != "tcp" {
		return nil, nil
	}
	c, err := tcp.ReadConfig(cfg.Extra)
	if err != nil {
		return nil, usagef("%w", err)
	}
	listen := c.Listen
	if listen == "" {
		listen = net.JoinHostPort(cfg.IP, "0")
	}
	guarded := c.Secret != "" || c.SecretFile != "" || c.SecretEnv != "" || c.TLSCA != ""
	return []entrance{{"the connector's listen", listen, guarded, "secret_file or tls_cert, tls_key and tls_ca in its configuration"}}, nil
}

// entrances are where the demo's engines wait for each other.
func (c *demoCmd) connectorEntrances() ([]entrance, error) {
	if c.Connector != "tcp" && c.Connector != "auto" {
		return nil, nil
	}
	extra := json.RawMessage(c.Extra)
	if !json.Valid(extra) {
		return nil, nil // refused where it is read
	}
	var given struct {
		Listen string `json:"listen"`
	}
	if err := json.Unmarshal(extra, &given); err != nil || given.Listen == "" {
		return nil, nil // on loopback, or refused where it is read
	}
	transfer, err := json.Marshal(map[string]any{"kv_connector": "tcp", "kv_role": connector.Both, "kv_connector_extra_config": extra})
	if err != nil {
		return nil, err
	}
	return transferEntrances(string(transfer))
}
