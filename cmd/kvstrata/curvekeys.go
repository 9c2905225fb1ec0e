package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"kvstrata/curve"
)

// curveKeysCmd makes the two files of keys that a publisher and its subscribers need.
type curveKeysCmd struct {
	Dir string `arg:"" help:"Folder for the files publisher.curve and subscriber.curve." type:"path"`
}

// Help shows how it is used.
func (curveKeysCmd) Help() string {
	return `The publisher lets in who has subscriber.curve; further keys go into its file as lines "allow = KEY". vLLM's own
publisher knows no keys: this is for publishers of ours.

Example:

  kvstrata curve-keys /etc/kvstrata
  kvstrata run --engine zmq+tcp://10.0.0.5:5557,model=MODEL,curve=/etc/kvstrata/subscriber.curve`
}

// Run writes both, and overwrites none.
func (c *curveKeysCmd) Run(a *app) error {
	publisher, subscriber, err := curve.Generate()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return fmt.Errorf("make folder of keys: %w", err)
	}
	for _, f := range []struct {
		name string
		keys *curve.Keys
	}{{"publisher.curve", publisher}, {"subscriber.curve", subscriber}} {
		path := filepath.Join(c.Dir, f.name)
		if err := writeNew(path, f.keys.Text()); err != nil {
			return fmt.Errorf("write keys: %w", err)
		}
		fmt.Fprintln(a.stdout, path)
	}
	return nil
}

// writeNew writes a file that only its owner may read, and that is not there yet.
func writeNew(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}
