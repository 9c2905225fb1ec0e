#!/usr/bin/env bash
# Everything of this folder, against the releases that setup.sh installs by default, LMCache, SGLang and Dynamo: that the
# golden files are what their own code yields, and that kvstrata and they understand one another. Ends with go test's
# closing lines. ALL=1 also checks the golden files of the older releases, of Dynamo's recorder and of Mooncake's master,
# which takes another gigabyte of downloads.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}

./setup.sh new old lmcache lmcache-v0 sglang sglang-salt sglang-hash dynamo
"$python" golden.py --check new old
"$python" golden_offload.py --check new
"$python" golden_hashes.py --check new old sglang-hash sglang
"$python" golden_lmcache.py --check
"$python" golden_lmcache_events.py --check
"$python" golden_sglang.py --check sglang sglang-salt
"$python" golden_dynamo.py --check dynamo
"$python" reference_trtllm.py --check
if [[ -n ${ALL:-} ]]; then
  ./setup.sh all
  "$python" golden.py --check
  "$python" golden_offload.py --check
  "$python" golden_sglang.py --check
  "$python" golden_dynamo.py --check
  "$python" golden_mooncake.py --check
fi
# The tests mostly wait, so more of them run at once than there are processors.
CI=1 go test -race -shuffle=on -count=1 -parallel=6 "$@" .
