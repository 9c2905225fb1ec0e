package history

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/ClickHouse/clickhouse-go/v2/lib/proto"
)

func TestHints(t *testing.T) {
	for _, test := range []struct {
		err  error
		want string // of the hint
	}{
		{&proto.Exception{Code: codeUnknownSetting, Message: "Unknown setting async_insert"}, "24.8 or newer"},
		// What 18.16 says over HTTP.
		{errors.New(`sendQuery: [HTTP 404] response body: "Code: 115, e.displayText() = DB::Exception: Unknown setting async_insert"`), "24.8 or newer"},
		{fmt.Errorf("x: %w", &proto.Exception{Code: codeReadOnly}), "may only read"},
		{errors.New(`[HTTP 500] response body: "Code: 164. DB::Exception: Cannot execute query in readonly mode. (READONLY)"`), "may only read"},
		{&proto.Exception{Code: codeAccessDenied}, "grant it"},
		{&proto.Exception{Code: codeTableReadOnly}, "Keeper"},
		{&proto.Exception{Code: codeNoSpace}, "--retention"},
		{errors.New("write: No space left on device"), "--retention"},
		{fmt.Errorf("x: %w", syscall.ENOSPC), "--retention"},
		{&proto.Exception{Code: codeUnknownColumn}, "kvstrata migrate"},
		{&proto.Exception{Code: codeNoCluster}, "--clickhouse-cluster"},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, "does it run"},
		{errors.New(`[HTTP 400] response body: "Port 19000 is for clickhouse-client program.\r\nYou must use port 18123 for HTTP.`), "clickhouse://"},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, ""},
		{&proto.Exception{Code: 1}, ""},
		{errors.New("Code: 1150. something else"), ""},
	} {
		got := hinted(test.err)
		if !errors.Is(got, test.err) || test.want == "" && got != test.err || !strings.Contains(got.Error(), test.want) {
			t.Errorf("%v, want %q", got, test.want)
		}
	}
}

func TestOlderVersions(t *testing.T) {
	for version, want := range map[string]bool{
		"18.16.1": true, "24.7.99": true, "24.8.1.1": false, "24.10": false, "26.7.1.1": false, "25.1": false, "unheard of": true, "": true,
	} {
		if older(version, oldest) != want {
			t.Errorf("%q: want %v", version, want)
		}
	}
}
