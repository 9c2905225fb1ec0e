package main

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// A token that goes to another machine in the clear is told of, once.
func TestATokenInTheClearIsToldOf(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	for _, tt := range []struct {
		url, token string
		warned     int
	}{
		{"http://192.0.2.1/", goodToken, 1},
		{"http://[2001:db8::1]:8080/", goodToken, 1},
		{"http://127.0.0.1:8080/", goodToken, 0},
		{"http://localhost/", goodToken, 0},
		{"http://192.0.2.1/", "", 0},
	} {
		t.Setenv("KVSTRATA_TOKEN", tt.token)
		var said bytes.Buffer
		client, err := clientFlags{}.client(slog.New(slog.NewTextHandler(&said, nil)), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		transport := client.Transport.(*bearer).next
		transport.Proxy = nil
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { // whatever the name
			return new(net.Dialer).DialContext(ctx, "tcp", server.Listener.Addr().String())
		}
		for range 2 {
			resp, err := client.Get(tt.url)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
		transport.CloseIdleConnections()
		if got := strings.Count(said.String(), "in the clear"); got != tt.warned || strings.Contains(said.String(), goodToken) {
			t.Errorf("%s with token %q: %s", tt.url, tt.token, said.String())
		}
	}
}
