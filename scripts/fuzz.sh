#!/usr/bin/env bash
# Runs every fuzz target for a time each (default 30s), one after another, and fails with the first finding.
set -euo pipefail
time=${1:-30s}
grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do
  dir=$(dirname "$file")
  grep -oE '^func (Fuzz[A-Za-z0-9_]*)' "$file" | awk '{print $2}' | while read -r target; do
    echo "fuzz $dir $target for $time"
    go test "$dir" -run '^$' -fuzz "^$target\$" -fuzztime "$time"
  done
done
