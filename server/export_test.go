package server

import "log/slog"

// Watch returns what gets a watched value.
func Watch[T any](log *slog.Logger, read func() (T, error), files ...string) (get func() (T, error), err error) {
	w, err := watch(log, read, files...)
	return w.get, err
}
