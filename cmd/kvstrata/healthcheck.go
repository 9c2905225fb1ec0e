package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// healthcheckCmd asks a process's own admin listener: a container's image has no other client that could.
type healthcheckCmd struct {
	clientFlags

	TLSCert string `name:"tls-cert" help:"The certificate that the process shows, as run has it." type:"path" placeholder:"FILE" env:"KVSTRATA_TLS_CERT"`
	Admin   string `help:"Address of the admin listener, as run has it." default:"127.0.0.1:8081" env:"KVSTRATA_ADMIN"`
	Alive   bool   `help:"Only whether it answers, not whether it has caught up."`
}

// Help shows how it is used.
func (healthcheckCmd) Help() string {
	return `Exits 0 when /readyz says so, or with --alive /healthz, and else 1, with what is missing.

Example:

  kvstrata healthcheck --admin 127.0.0.1:8081`
}

// healthcheckTime bounds the question; a container's own limit should be longer.
const healthcheckTime = 4 * time.Second

// healthcheckMost bounds what is read of the answer, in bytes.
const healthcheckMost = 4096

func (c *healthcheckCmd) scheme() string {
	if c.TLSCert != "" || c.CA != "" {
		return "https://"
	}
	return "http://"
}

// Run asks once.
func (c *healthcheckCmd) Run(a *app) error {
	host, port, err := net.SplitHostPort(c.Admin)
	if err != nil {
		return usagef("--admin %q: want host:port, as 127.0.0.1:8081", c.Admin)
	}
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		host = "127.0.0.1" // it listens everywhere, which is no place to dial
	}
	path := "/readyz"
	if c.Alive {
		path = "/healthz"
	}
	ctx, cancel := context.WithTimeout(a.ctx, healthcheckTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.scheme()+net.JoinHostPort(host, port)+path, nil)
	if err != nil {
		return usagef("--admin %q: %w", c.Admin, err)
	}
	client, err := c.clientFlags.local(a.log, c.TLSCert, healthcheckTime)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("%w; see that kvstrata run is up and that its --admin is the same", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, healthcheckMost))
	if err != nil {
		return fmt.Errorf("read answer of %s: %w", req.URL, err)
	}
	said := strings.TrimSpace(string(body))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s: %s", req.URL, resp.Status, strings.ReplaceAll(said, "\n", "; "))
	}
	fmt.Fprintln(a.stdout, said)
	return nil
}
