package curve_test

import (
	"os"
	"testing"

	"kvstrata/leaktest"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }
