package device

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Arena is memory for blocks outside the Go heap: the collector does not scan it and nothing moves it. It is an anonymous
// file mapped into the process, so that another process on the host may map it too.
type Arena struct {
	file *os.File
	mem  []byte
}

// NewArena maps so many bytes of zeros. The caller closes the arena once nothing refers to its memory.
func NewArena(name string, size int) (*Arena, error) {
	if size <= 0 {
		return nil, fmt.Errorf("make arena %s of %d bytes: want more than 0", name, size)
	}
	fd, err := unix.MemfdCreate("kvstrata-"+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make arena %s: %w", name, err)
	}
	file := os.NewFile(uintptr(fd), name)
	mem, err := mapFile(file, size)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make arena %s of %d bytes: %w", name, size, err), file.Close())
	}
	return &Arena{file: file, mem: mem}, nil
}

// mapFile gives a file its size for good and maps it: whoever maps it too must not be able to cut it under this process.
func mapFile(file *os.File, size int) ([]byte, error) {
	if err := file.Truncate(int64(size)); err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return nil, fmt.Errorf("seal its size: %w", err)
	}
	return unix.Mmap(int(file.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// Host returns the memory. It is gone once the arena is closed.
func (a *Arena) Host() []byte { return a.mem }

// Size returns the number of bytes.
func (a *Arena) Size() int { return len(a.mem) }

// File returns the file behind the memory, to be handed to another process.
func (a *Arena) File() *os.File { return a.file }

// Close unmaps the memory. It may be called again.
func (a *Arena) Close() error {
	if a.mem == nil {
		return nil
	}
	mem := a.mem
	a.mem = nil
	return errors.Join(unix.Munmap(mem), a.file.Close())
}
