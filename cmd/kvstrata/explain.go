package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"text/tabwriter"
	"time"

	"kvstrata/indexer/history"
)

type explainCmd struct {
	askFlags

	Hash  string `arg:"" help:"A prefix hash or an engine's hash, in hexadecimal."`
	Since string `help:"Only what happened since: a duration back from now, or a time." placeholder:"7d"`
	JSON  bool   `name:"json" help:"Print the story as JSON."`
}

// Help shows how it is used.
func (explainCmd) Help() string {
	return `Example:

  kvstrata explain 34dc6330fee229a2
  kvstrata explain 34dc6330fee229a2 --json --server http://10.0.0.9:8080`
}

// Run tells the story.
func (c *explainCmd) Run(a *app) error {
	story, err := c.ask(a)
	if err != nil {
		return err
	}
	if c.JSON {
		enc := json.NewEncoder(a.stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(story)
	}
	return printStory(a.stdout, story)
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
