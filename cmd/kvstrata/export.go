package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"kvstrata/indexer/history"
)

type exportCmd struct {
	tableFlags

	Since  string `help:"A duration back from now, as 15m or 7d, or a time." default:"10m"`
	Until  string `help:"The end of the window." placeholder:"now"`
	Engine string `help:"Only this engine (instance)."`
	Model  string `help:"Only this model."`
	Blocks int    `help:"Blocks whose time of residence is shown: a sample, by hash." default:"1000"`
	Limit  int    `help:"Runs, loads, transfers and rows of the ledger at most, each." default:"200000"`
	Format string `help:"perfetto: Trace Events in JSON, which ui.perfetto.dev opens." enum:"perfetto" default:"perfetto"`
	Output string `short:"o" help:"The file to write; -: standard output." default:"-" placeholder:"FILE"`
}

// Help shows how it is used.
func (exportCmd) Help() string {
	return `Example:

  kvstrata export --data ./data --since 5m -o window.json

Open the file in ui.perfetto.dev, which keeps it in the browser.`
}

// Run writes the window.
func (c *exportCmd) Run(a *app) (err error) {
	asked := map[string]string{"since": c.Since, "blocks": strconv.Itoa(c.Blocks), "limit": strconv.Itoa(c.Limit)}
	for name, value := range map[string]string{"until": c.Until, "engine": c.Engine, "model": c.Model} {
		if value != "" {
			asked[name] = value
		}
	}
	if err := history.CheckExport(asked); err != nil {
		return usagef("%w", err)
	}
	reader, err := c.open()
	if err != nil {
		return err
	}
	defer reader.Close()
	if c.Output == "-" {
		return reader.Export(a.ctx, a.stdout, asked)
	}
	out, err := os.Create(c.Output)
	if err != nil {
		return fmt.Errorf("write the trace: %w", err)
	}
	if err := errors.Join(reader.Export(a.ctx, out, asked), out.Close()); err != nil {
		return errors.Join(err, os.Remove(c.Output))
	}
	return nil
}
