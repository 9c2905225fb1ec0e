package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

type lookupCmd struct {
	clientFlags

	Server  string   `help:"Address of an index." default:"http://127.0.0.1:8080" env:"KVSTRATA_SERVER"`
	Model   string   `help:"Model, as the engines serve it." required:""`
	Cluster string   `help:"Only this cluster."`
	LoRA    string   `name:"lora" help:"Adapter name."`
	Salt    string   `help:"Cache salt."`
	Hashes  bool     `help:"The arguments are prefix hashes, in hexadecimal; they may begin in the middle of a prompt."`
	Explain bool     `help:"Tell of each source why its match ends where it does."`
	Device  bool     `help:"With --explain: count blocks on the device only."`
	JSON    bool     `name:"json" help:"Print the answer as JSON."`
	Prompt  []string `arg:"" optional:"" help:"Token ids, or - to read them from standard input, separated by blanks or commas."`
}

// Help shows how it is used.
func (lookupCmd) Help() string {
	return `Example:

  kvstrata lookup --model demo/llama-sim 101 202 303
  kvstrata lookup --model demo/llama-sim --hashes cb39170ee0a1e03c
  kvstrata lookup --model demo/llama-sim --explain 101 202 303
  tokenize prompt.txt | kvstrata lookup --model meta/Llama-3.1-8B -`
}

// Run asks, and prints a table.
func (c *lookupCmd) Run(a *app) error {
	req := prefix.Request{Model: c.Model, Cluster: c.Cluster, LoRA: c.LoRA, Salt: c.Salt, Anywhere: c.Hashes}
	words, err := c.words()
	if err != nil {
		return err
	}
	for _, word := range words {
		if c.Hashes {
			var h event.PrefixHash
			if err := h.UnmarshalText([]byte(word)); err != nil {
				return usagef("%w", err)
			}
			req.Hashes = append(req.Hashes, h)
			continue
		}
		token, err := tokenID(word)
		if err != nil {
			return fmt.Errorf("%w; prefix hashes go with --hashes", err)
		}
		req.Tokens = append(req.Tokens, token)
	}
	if len(words) == 0 {
		return usagef("no prompt: give token ids, or - to read them from standard input")
	}
	if c.Device && !c.Explain {
		return usagef("--device: goes with --explain; every lookup says how much lies on the device")
	}
	client, err := c.client(a.log, 30*time.Second)
	if err != nil {
		return err
	}
	if c.Explain {
		return c.explain(a, client, &prefix.ExplainRequest{Request: req, Device: c.Device})
	}
	var answer prefix.Answer
	body, err := post(a, client, c.Server+"/v1/lookup", &req, &answer)
	if err != nil {
		return err
	}
	if c.JSON {
		_, err = a.stdout.Write(body)
		return err
	}
	return printAnswer(a.stdout, &answer)
}

// explain asks why, and prints a sentence a source.
func (c *lookupCmd) explain(a *app, client *http.Client, req *prefix.ExplainRequest) error {
	var told prefix.Explanation
	body, err := post(a, client, c.Server+"/v1/lookup/explain", req, &told)
	if err != nil {
		return err
	}
	if c.JSON {
		_, err = a.stdout.Write(body)
		return err
	}
	for i := range told.Endings {
		fmt.Fprintf(a.stdout, "%s: %s\n", text(told.Endings[i].Source, "text"), text(told.Endings[i].Text, "text"))
	}
	if len(told.Unknown) > 0 {
		fmt.Fprintln(a.stdout, "Prefix hashes do not say whether the same tokens are there under another salt or adapter; token ids do.")
	}
	return nil
}

func (c *lookupCmd) words() ([]string, error) {
	text := strings.Join(c.Prompt, " ")
	if text == "-" {
		in, err := io.ReadAll(os.Stdin)
		if err != nil {
			return nil, fmt.Errorf("read token ids: %w", err)
		}
		text = string(in)
	}
	return words(text), nil
}

// words are what stands between blanks, commas and brackets, so that a list in JSON is read as well.
func words(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\r\n,[]", r) })
}

// tokenID reads one token id.
func tokenID(word string) (uint32, error) {
	token, err := strconv.ParseUint(word, 10, 32)
	if err != nil {
		return 0, usagef("token id %q: want a number below 4294967296", word)
	}
	return uint32(token), nil
}

// post sends a request to a server of ours and reads its answer; an error of the server is returned as it says it.
func post(a *app, client *http.Client, url string, request, answer any) ([]byte, error) {
	payload, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(a.ctx, http.MethodPost, url, bytes.NewReader(payload))
	if err != nil {
		return nil, usagef("--server: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the server: %w; see that it runs, and --server", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read the server's answer: %w", err)
	}
	if resp.StatusCode == http.StatusUnauthorized {
		return nil, errNoToken
	}
	if resp.StatusCode != http.StatusOK {
		return nil, refusal(resp, body)
	}
	if err := json.Unmarshal(body, answer); err != nil {
		return nil, fmt.Errorf("read the server's answer: %w", err)
	}
	return body, nil
}

// refusal is what a server that does not answer says instead.
func refusal(resp *http.Response, body []byte) error {
	var problem struct{ Error string }
	if json.Unmarshal(body, &problem) == nil && problem.Error != "" {
		return fmt.Errorf("the server says: %s", problem.Error)
	}
	return fmt.Errorf("the server answers %s; is %s one of ours?", resp.Status, resp.Request.URL.Host)
}

func printAnswer(out io.Writer, answer *prefix.Answer) error {
	w := tabwriter.NewWriter(out, 2, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SOURCE\tSTATE\tTOKENS\tBLOCKS\tON DEVICE\tTIERS")
	for _, m := range answer.Matches {
		var tiers []string
		for _, t := range m.Tiers {
			tiers = append(tiers, fmt.Sprintf("%s %d", t.Tier, t.Blocks))
		}
		if m.MatchedBy == "engine_hash" {
			tiers = append(tiers, "some by engine hash")
		}
		fmt.Fprintf(w, "%v\t%v\t%d\t%d of %d\t%d\t%s\n", m.Source, m.State, m.Tokens, m.Blocks, m.BlockSize, m.DeviceTokens, strings.Join(tiers, ", "))
		if m.Reach != nil {
			var from []string
			for _, s := range m.Reach.Stores {
				from = append(from, fmt.Sprintf("%d from %s", s.Blocks, s.Source.Instance))
			}
			fmt.Fprintf(w, "  with its stores\t\t%d\t%d of %d\t\t%s\n", m.Reach.Tokens, m.Reach.Blocks, m.BlockSize, strings.Join(from, ", "))
		}
	}
	for _, l := range answer.LeftOut {
		fmt.Fprintf(w, "%v\t%v\tleft out: %s\n", l.Source, l.State, l.Reason)
	}
	return w.Flush()
}
