package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

var errLocked = errors.New("another history engine has this folder")

// lockDir takes the folder's lock, which ends with the process at the latest. The file bears the holder's process id, for people.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock history folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			holder := make([]byte, 20)
			n, _ := f.ReadAt(holder, 0)
			return nil, fmt.Errorf("lock history folder %s: %w (process %s); stop it, or choose another folder", dir, errLocked, strings.TrimSpace(string(holder[:n])))
		}
		return nil, fmt.Errorf("lock history folder %s: %w", dir, err)
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, fmt.Sprintln(os.Getpid()))); err != nil {
		return nil, errors.Join(fmt.Errorf("lock history folder: %w", err), f.Close())
	}
	return f, nil
}

func writeAt(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}
