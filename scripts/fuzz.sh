#!/usr/bin/env bash
# Runs every fuzz target for a time each (default 30s), one after another, and fails with the first finding.
set -euo pipefail
time=${1:-30s}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# The fuzzer itself fails now and then with nothing but a deadline, when its time ends while it hands out work: that is no
# finding, and the target gets its time again. A finding always writes the input that failed.
fuzz() {
  for _ in 1 2 3; do
    if go test "$1" -run '^$' -fuzz "^$2\$" -fuzztime "$time" 2>&1 | tee "$log"; then
      return 0
    fi
    grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log" || return 1
  done
  return 1
}

grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do
  dir=$(dirname "$file")
  grep -oE '^func (Fuzz[A-Za-z0-9_]*)' "$file" | awk '{print $2}' | while read -r target; do
    echo "fuzz $dir $target for $time"
    fuzz "$dir" "$target" </dev/null
  done
done
