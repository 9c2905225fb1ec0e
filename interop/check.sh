#!/usr/bin/env bash
# Everything of this folder, against the releases that setup.sh installs by default, and LMCache: that the golden files are
# what vLLM's, SGLang's and LMCache's own code yields, and that kvstrata and they understand one another. Ends with go test's closing
# lines.
set -euo pipefail
cd "$(dirname "$0")"

./setup.sh new old lmcache lmcache-v0 sglang-hash sglang
"${PYTHON:-python3}" golden.py --check new old
"${PYTHON:-python3}" golden_hashes.py --check new old sglang-hash sglang
"${PYTHON:-python3}" golden_lmcache.py --check
# The tests mostly wait, so more of them run at once than there are processors.
CI=1 go test -race -shuffle=on -count=1 -parallel=6 "$@" .
