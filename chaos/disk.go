package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// diskSize is what ClickHouse's small disk holds.
const diskSize = "256m"

// mountSmall puts a small disk where ClickHouse's data go. It takes root.
func mountSmall(dir string) error {
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+diskSize); err != nil {
		return fmt.Errorf("mount a small disk at %s: %w", dir, err)
	}
	return nil
}

func unmount(dir string) error { return syscall.Unmount(dir, syscall.MNT_DETACH) }

// fill fills the disk at a folder for a time.
func fill(ctx context.Context, dir string, long time.Duration) (err error) {
	f, err := os.CreateTemp(dir, "filler-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	for end := time.Now().Add(long); time.Now().Before(end) && ctx.Err() == nil; sleep(ctx, 50*time.Millisecond) {
		if _, err := io.Copy(f, zeros{}); !errors.Is(err, syscall.ENOSPC) { // what merges and logs gave free is filled as well
			return fmt.Errorf("fill the disk: %w", err)
		}
	}
	return nil
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }
