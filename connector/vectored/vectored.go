// Package vectored moves many pieces of memory through a socket with one system call, without allocating: what the net
// package has for writing, and not for reading.
package vectored

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Max is how many pieces one call takes (IOV_MAX).
const Max = 1024

// Of returns the vector of a piece. The piece must be kept alive, and must not move: it is for calls that follow at once.
func Of(piece []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(piece)}
	v.SetLen(len(piece))
	return v
}

// Read is readv on a socket that does not block: it returns how many bytes came, 0 at the end of the stream.
func Read(fd uintptr, iov []unix.Iovec) (int, unix.Errno) { return call(unix.SYS_READV, fd, iov) }

// Write is writev on a socket that does not block: it returns how many bytes went.
func Write(fd uintptr, iov []unix.Iovec) (int, unix.Errno) { return call(unix.SYS_WRITEV, fd, iov) }

func call(number, fd uintptr, iov []unix.Iovec) (int, unix.Errno) {
	for {
		n, _, errno := unix.Syscall(number, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)))
		runtime.KeepAlive(iov)
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// Advance takes the first n bytes off vectors, because a call has moved them.
func Advance(iov []unix.Iovec, n int) []unix.Iovec {
	for len(iov) > 0 && uint64(n) >= iov[0].Len {
		n -= int(iov[0].Len)
		iov = iov[1:]
	}
	if n > 0 {
		iov[0].Base = (*byte)(unsafe.Add(unsafe.Pointer(iov[0].Base), n))
		iov[0].Len -= uint64(n)
	}
	return iov
}
