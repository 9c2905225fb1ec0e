package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"text/tabwriter"
	"time"

	"kvstrata/indexer/history"
)

type explainCmd struct {
	askFlags

	Hash  string `arg:"" optional:"" help:"A prefix hash or an engine's hash, in hexadecimal."`
	Since string `help:"Of a hash: only what happened since: a duration back from now, or a time." placeholder:"7d"`
	promptFlags
	JSON bool `name:"json" help:"Print the story as JSON."`
}

// promptFlags name a prompt, or a request, whose cached prefix is explained.
type promptFlags struct {
	Tokens    string   `help:"File of a prompt's token ids, or - for standard input: numbers between blanks or commas, or as JSON." placeholder:"FILE"`
	Request   string   `help:"Name of a request, as connectors tell it."`
	Model     string   `help:"Of a prompt: the model, as the engines serve it."`
	Engine    string   `help:"Only this engine (instance)."`
	LoRA      string   `name:"lora" help:"Adapter name."`
	Salt      string   `help:"Cache salt."`
	OtherLoRA []string `name:"other-lora" help:"An adapter under which the same tokens may be there; may be repeated." placeholder:"NAME"`
	OtherSalt []string `name:"other-salt" help:"A salt under which the same tokens may be there; may be repeated."`
	BlockSize uint32   `help:"Tokens a block; 0: each size that history knows."`
	Eagle     bool     `help:"Blocks cover one token more, as with EAGLE."`
	Tier      string   `help:"Count blocks in this tier only."`
	At        string   `help:"The moment: a time, or a duration back from now; empty: now." placeholder:"15m"`
	HashKey   string   `help:"Key of the prefix hashes, with --data or --clickhouse; a server knows its own." env:"KVSTRATA_HASH_KEY"`
}

// prompt returns what is asked about; nil without tokens and request.
func (f *promptFlags) prompt() (*history.Prompt, error) {
	if f.Tokens == "" && f.Request == "" {
		return nil, nil
	}
	p := &history.Prompt{
		Model: f.Model, Engine: f.Engine, LoRA: f.LoRA, Salt: f.Salt, Request: f.Request, BlockSize: f.BlockSize, Eagle: f.Eagle, Tier: f.Tier, At: f.At,
	}
	for _, name := range f.OtherLoRA {
		p.Others = append(p.Others, history.Variant{LoRA: name, Salt: f.Salt})
	}
	for _, salt := range f.OtherSalt {
		p.Others = append(p.Others, history.Variant{LoRA: f.LoRA, Salt: salt})
	}
	if f.Tokens == "" {
		return p, nil
	}
	in := os.Stdin
	if f.Tokens != "-" {
		var err error
		if in, err = os.Open(f.Tokens); err != nil {
			return nil, usagef("--tokens: %w", err)
		}
		defer in.Close()
	}
	text, err := io.ReadAll(in)
	if err != nil {
		return nil, fmt.Errorf("read token ids: %w", err)
	}
	for _, word := range words(string(text)) {
		token, err := tokenID(word)
		if err != nil {
			return nil, err
		}
		p.Tokens = append(p.Tokens, token)
	}
	return p, nil
}

// Help shows how it is used.
func (explainCmd) Help() string {
	return `Example:

  kvstrata explain 34dc6330fee229a2
  kvstrata explain 34dc6330fee229a2 --json --server http://10.0.0.9:8080
  tokenize prompt.txt | kvstrata explain --tokens - --model meta/Llama-3.1-8B --at 15m
  kvstrata explain --request chatcmpl-7f3a`
}

// Run tells the story of a block, or walks a prompt.
func (c *explainCmd) Run(a *app) error {
	p, err := c.prompt()
	if err != nil {
		return err
	}
	switch {
	case p != nil && (c.Hash != "" || c.Since != ""):
		return usagef("a hash and --since do not go with --tokens and --request")
	case p != nil:
		return c.walk(a, p)
	case c.Hash == "":
		return usagef("give a hash, --tokens or --request")
	}
	story, err := c.ask(a)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(a.stdout, story)
	}
	return printStory(a.stdout, story)
}

// walk explains a prompt or a request.
func (c *explainCmd) walk(a *app, p *history.Prompt) error {
	if err := p.Validate(); err != nil {
		return usagef("%w", err)
	}
	walk := new(history.Walk)
	if c.named() {
		cfg, err := c.config()
		if err != nil {
			return err
		}
		cfg.HashKey = c.HashKey
		reader, err := history.NewReader(cfg)
		if err != nil {
			return err
		}
		defer reader.Close()
		if walk, err = reader.Walk(a.ctx, p); err != nil {
			return err
		}
	} else {
		client, err := c.client(a.log, time.Minute)
		if err != nil {
			return err
		}
		if _, err := post(a, client, c.Server+"/v1/explain", p, walk); err != nil {
			return err
		}
	}
	if c.JSON {
		return printJSON(a.stdout, walk)
	}
	for _, sentence := range walk.Summary {
		fmt.Fprintln(a.stdout, text(sentence, "text"))
	}
	for _, note := range walk.Notes {
		fmt.Fprintf(a.stdout, "\nNote: %s.\n", text(note, "text"))
	}
	return nil
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func (c *explainCmd) ask(a *app) (*history.Story, error) {
	if err := history.CheckExplain(c.Hash, c.Since); err != nil {
		return nil, usagef("%w", err)
	}
	reader, err := c.open(a)
	if err != nil {
		return nil, err
	}
	if reader != nil {
		defer reader.Close()
		story, err := reader.Explain(a.ctx, c.Hash, c.Since)
		if errors.Is(err, history.ErrBadParam) {
			return nil, usagef("%w", err)
		}
		return story, err
	}
	values := url.Values{}
	if c.Since != "" {
		values.Set("since", c.Since)
	}
	story := new(history.Story)
	return story, c.get(a, "/v1/explain/"+url.PathEscape(c.Hash), values, story)
}

func printStory(w io.Writer, s *history.Story) error {
	for _, sentence := range s.Summary {
		fmt.Fprintln(w, text(sentence, "text"))
	}
	if !s.Found {
		return nil
	}
	fmt.Fprintln(w)
	for _, n := range s.Names {
		fmt.Fprintf(w, "%s: prefix %s, the engine's hash %s\n", text(n.Model, "text"), orUnknown(n.Prefix), n.EngineHash)
	}
	if s.Parent != nil {
		fmt.Fprintf(w, "continues prefix %s, the engine's hash %s\n", orUnknown(s.Parent.Prefix), s.Parent.EngineHash)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
	fmt.Fprintln(t, "TIME\tENGINE\tEVENT\tTIER\tCOPIES\tAGE\tEPOCH\tSEQ\tREASON")
	for _, l := range s.Events {
		copies, age := "–", "–"
		if l.Effect != 0 {
			copies = fmt.Sprintf("%+d", l.Effect)
		}
		if l.Copies != nil && l.Op == "EVICTED" {
			copies += fmt.Sprintf(", %d left", *l.Copies)
		}
		if l.Age != nil {
			age = time.Duration(*l.Age * float64(time.Second)).Round(time.Millisecond).String()
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", time.UnixMilli(l.Time).Format("2006-01-02 15:04:05.000"),
			text(l.Instance, "text"), l.Op, text(l.Tier, "text"), copies, age, l.Epoch, l.Seq, text(l.Reason, "text"))
	}
	return t.Flush()
}

func orUnknown(hash string) string {
	if hash == "" {
		return "unknown"
	}
	return hash
}
