package main

import (
	"crypto/tls"
	"fmt"
	"os"

	"kvstrata/bus"
)

// natsLogin says who we are to NATS. Where the server is embedded it is the server's: whom it lets in.
type natsLogin struct {
	NATSUser         string `name:"nats-user" help:"User of NATS; where it is embedded, who is let in." placeholder:"USER" env:"KVSTRATA_NATS_USER"`
	NATSPasswordFile string `name:"nats-password-file" help:"File whose first line is the user's password; or $KVSTRATA_NATS_PASSWORD holds it." type:"path" placeholder:"FILE" env:"KVSTRATA_NATS_PASSWORD_FILE"`
	NATSNKey         string `name:"nats-nkey" help:"File with an NKey user's seed; where NATS is embedded, with the seeds or public keys of who is let in." type:"path" placeholder:"FILE" env:"KVSTRATA_NATS_NKEY"`
	NATSCreds        string `name:"nats-creds" help:"NATS credentials file." type:"path" placeholder:"FILE" env:"KVSTRATA_NATS_CREDS"`
	NATSCA           string `name:"nats-ca" help:"Certificates in PEM that NATS's must come from; where it is embedded, its clients'." type:"path" placeholder:"FILE" env:"KVSTRATA_NATS_CA"`
	NATSCert         string `name:"nats-cert" help:"Our certificate in PEM; where NATS is embedded, its." type:"path" placeholder:"FILE" env:"KVSTRATA_NATS_CERT"`
	NATSKey          string `name:"nats-key" help:"The key of --nats-cert." type:"path" placeholder:"FILE" env:"KVSTRATA_NATS_KEY"`
	NATSServerName   string `name:"nats-server-name" help:"Name that NATS's certificate must have; empty: the one in --nats." placeholder:"NAME" env:"KVSTRATA_NATS_SERVER_NAME"`
}

func (f natsLogin) identity() bus.Identity {
	id := bus.Identity{
		User: f.NATSUser, PasswordFile: f.NATSPasswordFile, NKey: f.NATSNKey, CA: f.NATSCA, Cert: f.NATSCert, Key: f.NATSKey,
	}
	if id.User != "" && id.PasswordFile == "" {
		id.Password = bus.Secret(os.Getenv(bus.PasswordVariable))
	}
	return id
}

// client enters the login into the configuration of a client.
func (f natsLogin) client(cfg bus.Config) bus.Config {
	cfg.Identity, cfg.Credentials, cfg.ServerName = f.identity(), f.NATSCreds, f.NATSServerName
	return cfg
}

// server returns the configuration of an embedded server.
func (f natsLogin) server(listen string) (bus.ServerConfig, error) {
	cfg, err := bus.ListenAt(listen)
	if err != nil {
		return cfg, usagef("--nats-listen %q: %w", listen, err)
	}
	if f.NATSCreds != "" {
		return cfg, usagef("--nats-creds: an embedded server knows no credentials files; give --nats-user or --nats-nkey")
	}
	cfg.Identity = f.identity()
	if err := cfg.Validate(); err != nil {
		return cfg, usagef("%w", err)
	}
	return cfg, nil
}

// child returns the arguments with which a process of ours logs in to the server that is embedded here. A password that is
// in the environment is in the process's too.
func (f natsLogin) child(url string) (args []string, err error) {
	if f.NATSUser != "" && f.NATSNKey != "" { // a client is one of them
		return nil, usagef("--nats-user, --nats-nkey: want one of them with --processes")
	}
	args = []string{"--nats", url}
	for flag, value := range map[string]string{
		"--nats-user": f.NATSUser, "--nats-password-file": f.NATSPasswordFile, "--nats-nkey": f.NATSNKey,
	} {
		if value != "" {
			args = append(args, flag, value)
		}
	}
	if f.NATSCert == "" {
		return args, nil
	}
	name, err := certName(f.NATSCert, f.NATSKey)
	if err != nil {
		return nil, usagef("--nats-cert: %w", err)
	}
	// It trusts this one certificate, and shows it where one is wanted.
	args = append(args, "--nats-ca", f.NATSCert, "--nats-server-name", name)
	if f.NATSCA != "" {
		args = append(args, "--nats-cert", f.NATSCert, "--nats-key", f.NATSKey)
	}
	return args, nil
}

// certName returns a name that a certificate is good for.
func certName(cert, key string) (string, error) {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return "", err
	}
	switch leaf := pair.Leaf; {
	case len(leaf.DNSNames) > 0:
		return leaf.DNSNames[0], nil
	case len(leaf.IPAddresses) > 0:
		return leaf.IPAddresses[0].String(), nil
	default:
		return "", fmt.Errorf("%s names no host", cert)
	}
}
