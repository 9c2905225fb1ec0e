package embedded

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// niceness is how far the engine stands back behind the process that feeds it: events become visible before they are
// history. Where there is room on the machine it costs nothing.
const niceness = 10

// standBack lowers the priority of every thread of this process; those to come inherit it.
func standBack() error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("lower the engine's priority: %w", err)
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			continue
		}
		if err := syscall.Setpriority(syscall.PRIO_PROCESS, tid, niceness); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("lower the engine's priority: %w", err)
		}
	}
	return nil
}
