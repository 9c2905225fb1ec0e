package server

import (
	"log/slog"
	"os"
	"sync"
	"time"
)

// lookEvery is how often at most files are looked at for changes; it is the longest that what was taken out of one counts.
const lookEvery = time.Second

// watched is a value that is read from files, and read again when one of them changes. A file that can't be read is told in
// the log, once, and tried again.
type watched[T any] struct {
	files []string
	read  func() (T, error)
	log   *slog.Logger

	mu     sync.Mutex
	looked time.Time
	seen   []os.FileInfo // nil entries: not there
	value  T             // the last that could be read
	err    error         // why the present one can't
}

// watch reads for the first time.
func watch[T any](log *slog.Logger, read func() (T, error), files ...string) (*watched[T], error) {
	w := &watched[T]{files: files, read: read, log: log}
	_, err := w.get()
	return w, err
}

// get returns the last value that could be read, and why the present one could not.
func (w *watched[T]) get() (T, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	first, before := w.looked.IsZero(), w.err
	if !first && now.Sub(w.looked) < lookEvery {
		return w.value, w.err
	}
	w.looked = now
	if !w.changed() && w.err == nil {
		return w.value, nil
	}
	value, err := w.read()
	if w.err = err; err == nil {
		w.value = value
	}
	switch {
	case first: // told by whoever starts
	case err != nil && (before == nil || before.Error() != err.Error()):
		w.log.Error("a file that changed can't be used", "err", err)
	case err == nil:
		w.log.Info("read again what changed", "files", w.files)
	}
	return w.value, w.err
}

// changed looks at the files.
func (w *watched[T]) changed() bool {
	before := w.seen
	w.seen = make([]os.FileInfo, len(w.files))
	changed := before == nil
	for i, name := range w.files {
		info, err := os.Stat(name)
		if err != nil {
			info = nil
		}
		w.seen[i] = info
		changed = changed || !sameFile(before[i], info)
	}
	return changed
}

func sameFile(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
