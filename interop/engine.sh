#!/usr/bin/env bash
# Runs whole vLLM engines, on the CPU, against kvstrata. Not a part of check.sh: PyTorch and what it needs take 5 GB and two
# minutes to install. Ends with go test's closing lines.
set -euo pipefail
cd "$(dirname "$0")"

./setup.sh engine
go vet -tags engine .
# Two engines at a time are what two processors can take.
CI=1 go test -tags engine -run '^TestEngine(Reuse|Crowd|Reset|Lives|FullReports|Server|Simulated|TwoGroups)$' -count=1 -parallel=2 -timeout 20m "$@" .
