#!/usr/bin/env bash
# Installs what kvstrata needs beyond Go, git, gcc and make on Debian 12, and says so. Does nothing when all is there.
set -euo pipefail

missing=()
need() { # command, package, remedy
  command -v "$1" >/dev/null 2>&1 || { echo "setup: $1 is missing: $2" >&2; exit 1; }
}
need go "install Go 1.26 or newer (https://go.dev/doc/install)"
need gcc "install a C compiler: apt-get install gcc"
need git "apt-get install git"

version=$(go env GOVERSION)
case "$version" in
  go1.2[6-9]*|go1.[3-9][0-9]*|go[2-9]*) ;;
  *) echo "setup: $version is too old: kvstrata needs Go 1.26 or newer" >&2; exit 1 ;;
esac

command -v pkg-config >/dev/null 2>&1 || missing+=(pkg-config)
if ! command -v pkg-config >/dev/null 2>&1 || ! pkg-config --atleast-version=4.3 libzmq; then
  missing+=(libzmq3-dev)
fi
[ ${#missing[@]} -eq 0 ] && exit 0

echo "setup: installing ${missing[*]}"
if ! command -v apt-get >/dev/null 2>&1; then
  echo "setup: no apt-get here; install pkg-config and libzmq 4.3 or newer with its headers by hand" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "setup: not root; run: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
log=$(mktemp)
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "setup: apt-get failed; its last lines are above" >&2
  exit 1
fi
rm -f "$log"
