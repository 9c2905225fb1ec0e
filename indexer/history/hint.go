package history

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/proto"
)

// oldest is the oldest version of ClickHouse that is asked to work with the tables; tests use the embedded engine's.
const oldest = "24.8"

// Codes of ClickHouse for what only its operator can change.
const (
	codeUnknownSetting = 115
	codeReadOnly       = 164
	codeTableReadOnly  = 242
	codeNoSpace        = 243
	codeAccessDenied   = 497
	codeUnknownColumn  = 16
	codeUnknownName    = 47
	codeNoCluster      = 701
	codeNoKeeper       = 225
)

// hints say what to do about an error of ClickHouse.
var hints = map[int32]string{
	codeUnknownSetting: "it is too old: use " + oldest + " or newer",
	codeReadOnly:       "this user may only read: give one that may write, or set readonly = 0 in its profile",
	codeAccessDenied:   "this user may not do that: grant it CREATE, ALTER, DROP, INSERT and SELECT on the database, and KILL QUERY",
	codeAuthentication: "look at user and password of --clickhouse",
	codeTableReadOnly:  "the replica is read-only: look whether Keeper answers it",
	codeNoKeeper:       "it has no Keeper, which a cluster needs: look at <zookeeper> in its configuration",
	codeNoCluster:      "its configuration has no such cluster: look at <remote_servers>, or at --clickhouse-cluster",
	codeNoSpace:        "its disk is full: make room, or keep less with --retention",
	codeUnknownTable:   "the tables are of another version: run kvstrata migrate, or use another database",
	codeUnknownColumn:  "the tables are of another version: run kvstrata migrate, or use another database",
	codeUnknownName:    "the tables are of another version: run kvstrata migrate, or use another database",
	codeMemoryLimit:    "it has too little memory: give it more (--clickhouse-memory, of a server max_server_memory_usage)",
}

// hinted adds to an error what to do about it, where that is known.
func hinted(err error) error {
	if hint := hintOf(err); hint != "" {
		return fmt.Errorf("%w; %s", err, hint)
	}
	return err
}

func hintOf(err error) string {
	var exception *proto.Exception
	if errors.As(err, &exception) {
		return hints[exception.Code]
	}
	text := fmt.Sprint(err)
	for code, hint := range hints { // over HTTP the code is a part of a text
		if strings.Contains(text, "Code: "+strconv.Itoa(int(code))+".") || strings.Contains(text, "Code: "+strconv.Itoa(int(code))+",") {
			return hint
		}
	}
	var dial *net.OpError
	switch {
	case errors.Is(err, syscall.ENOSPC) || strings.Contains(text, "No space left on device"):
		return hints[codeNoSpace]
	case errors.As(err, &dial) && dial.Op == "dial":
		return "does it run, and is the address right? NATS keeps the events meanwhile"
	case strings.Contains(text, "for clickhouse-client program"):
		return "that is the port of the native protocol: write clickhouse:// before it"
	}
	return ""
}

// ErrTooOld says that a ClickHouse lacks what the tables need.
var ErrTooOld = errors.New("this ClickHouse is too old")

// checkVersion refuses a ClickHouse that is too old.
func checkVersion(ctx context.Context, conn clickhouse.Conn) error {
	var version string
	if err := conn.QueryRow(ctx, "SELECT version()").Scan(&version); err != nil {
		return err
	}
	if older(version, oldest) {
		return fmt.Errorf("%w: it is %s; use %s or newer", ErrTooOld, version, oldest)
	}
	return nil
}

// older compares the first two numbers of versions.
func older(version, than string) bool {
	number := func(text string, n int) int {
		parts := strings.SplitN(text, ".", n+2)
		if n >= len(parts) {
			return 0
		}
		v, err := strconv.Atoi(parts[n])
		if err != nil {
			return 0
		}
		return v
	}
	for n := range 2 {
		if a, b := number(version, n), number(than, n); a != b {
			return a < b
		}
	}
	return false
}
