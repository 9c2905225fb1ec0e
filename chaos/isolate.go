package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// isolatedEnv is set in the process that has mounts of its own.
const isolatedEnv = "KVSTRATA_CHAOS_ISOLATED"

// isolate runs this program again with mounts of its own, which end with it however it ends, and returns its exit code. Where
// that can't be done, or was done, isolated is false.
func isolate(ctx context.Context) (code int, isolated bool) {
	if os.Geteuid() != 0 || os.Getenv(isolatedEnv) != "" {
		return 0, false
	}
	runtime.LockOSThread() // the other one is killed when the thread that started it ends
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), isolatedEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM, Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if cmd.Start() != nil {
		return 0, false // the small disk will say what is not done
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() < 0) { // not by itself
		return exitFailure, true
	}
	return cmd.ProcessState.ExitCode(), true
}
