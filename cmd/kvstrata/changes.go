package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

type changesCmd struct {
	clientFlags

	Server    string   `help:"Address of an index." default:"http://127.0.0.1:8080" env:"KVSTRATA_SERVER"`
	Source    string   `help:"One source, by its id as GET /v1/sources?… takes it: cluster.model.instance.rank.origin." placeholder:"ID"`
	Model     string   `help:"All sources of this model."`
	Cluster   string   `help:"With --model: only this cluster."`
	Prefix    []string `help:"With --model: only blocks with these prefix hashes." placeholder:"HASH"`
	BlockSize uint32   `help:"With --prefix: tokens a block; 0: any." default:"0"`
	Count     int      `help:"End after so many lines; 0: never." default:"0"`
}

// Help shows how it is used.
func (changesCmd) Help() string {
	return `First what is resident (begin, held, listed), then every change (rose, fell, cleared, state). Example:

  kvstrata changes --model demo/llama-sim
  kvstrata changes --source default.demo%2Fllama-sim.prefill-0.0.engine | jq -c 'select(.kind == "fell")'`
}

// Run prints changes until a signal comes.
func (c *changesCmd) Run(a *app) error {
	if (c.Source == "") == (c.Model == "") {
		return usagef("--source, --model: give one of them")
	}
	values := url.Values{"prefix": c.Prefix}
	for name, value := range map[string]string{"source": c.Source, "model": c.Model, "cluster": c.Cluster} {
		if value != "" {
			values.Set(name, value)
		}
	}
	if c.BlockSize != 0 {
		values.Set("block_size", strconv.FormatUint(uint64(c.BlockSize), 10))
	}
	req, err := http.NewRequestWithContext(a.ctx, http.MethodGet, strings.TrimSuffix(c.Server, "/")+"/v1/changes?"+values.Encode(), nil)
	if err != nil {
		return usagef("--server: %w", err)
	}
	client, err := c.client(a.log, 0)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if a.ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ask the index: %w; see that it runs, and --server", err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return errNoToken
	case resp.StatusCode != http.StatusOK:
		body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		if err != nil {
			return fmt.Errorf("read the index's answer: %w", err)
		}
		return refusal(resp, body)
	}
	return c.print(a, lines)
}

// print copies lines, up to the one that says why no more come.
func (c *changesCmd) print(a *app, lines *bufio.Scanner) error {
	for n := 1; lines.Scan(); n++ {
		var last struct{ Error string }
		if json.Unmarshal(lines.Bytes(), &last) == nil && last.Error != "" {
			return fmt.Errorf("the index says: %s", last.Error)
		}
		if _, err := fmt.Fprintln(a.stdout, lines.Text()); err != nil {
			return err
		}
		if n == c.Count {
			return nil
		}
	}
	if a.ctx.Err() != nil {
		return nil
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read changes: %w; start again for what is resident now", err)
	}
	return errors.New("the index went away; start again for what is resident now")
}
