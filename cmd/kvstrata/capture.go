package main

import (
	"errors"
	"fmt"
	"os"

	"kvstrata/subscriber"
)

type captureCmd struct {
	Engine string `arg:"" help:"The engine, as --engine of run has it."`
	Output string `short:"o" help:"The file to write; it must not be there." required:"" placeholder:"FILE"`
	Count  int    `help:"End after so many batches; 0: when a signal comes." default:"0"`
}

// Help shows how it is used.
func (captureCmd) Help() string {
	return `Example:

  kvstrata capture zmq+tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558,model=meta/Llama-3.1-8B -o frames.jsonl
  kvstrata import frames.jsonl --model meta/Llama-3.1-8B

The file holds all that the engine sends, the token ids of prompts among it: it is for people who may read those.`
}

// Run captures until a signal comes.
func (c *captureCmd) Run(a *app) error {
	engines, err := subscriber.ParseEngine(c.Engine)
	if err != nil {
		return usagef("%w", err)
	}
	if len(engines) != 1 {
		return usagef("ranks=%d: a capture is of one rank; name its port", len(engines))
	}
	if c.Count < 0 {
		return usagef("--count %d: want 0 or more", c.Count)
	}
	out, err := os.OpenFile(c.Output, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return usagef("--output: %w", err)
	}
	n, err := subscriber.Capture(a.ctx, engines[0], out, c.Count)
	if err = errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("capture %v: %w", engines[0].Source, err)
	}
	_, err = fmt.Fprintf(a.stdout, "%d batches in %s; it holds prompts' tokens\n", n, c.Output)
	return err
}
