package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/pebbe/zmq4"
)

// version is set by the Makefile.
var version = "devel"

type versionCmd struct{}

// Help shows how it is used.
func (versionCmd) Help() string { return "Example:\n\n  kvstrata version" }

// Run prints our version and those of what is built in.
func (versionCmd) Run(a *app) error {
	major, minor, patch := zmq4.Version()
	fmt.Fprintf(a.stdout, "kvstrata %s\n%s %s/%s\nlibzmq %d.%d.%d\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH, major, minor, patch)
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	for _, dep := range info.Deps {
		switch dep.Path {
		case "github.com/nats-io/nats-server/v2", "github.com/nats-io/nats.go":
			fmt.Fprintf(a.stdout, "%s %s\n", dep.Path, dep.Version)
		}
	}
	return nil
}
