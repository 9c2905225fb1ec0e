#!/usr/bin/env bash
# Installs what kvstrata needs beyond Go, Node, git, gcc and make on Debian 12, and says so: Debian packages, the ClickHouse
# engine and the dashboard's libraries. With the argument "test", also what only tests need. Does nothing when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
need() { # command, remedy
  command -v "$1" >/dev/null 2>&1 || { echo "setup: $1 is missing: $2" >&2; exit 1; }
}
need go "install Go 1.26 or newer (https://go.dev/doc/install)"
need gcc "install a C compiler: apt-get install gcc"
need git "apt-get install git"
need node "install Node 20.19 or newer with npm (https://nodejs.org)"
need npm "install Node 20.19 or newer with npm (https://nodejs.org)"

version=$(go env GOVERSION)
case "$version" in
  go1.2[6-9]*|go1.[3-9][0-9]*|go[2-9]*) ;;
  *) echo "setup: $version is too old: kvstrata needs Go 1.26 or newer" >&2; exit 1 ;;
esac
version=$(node --version)
case "$version" in
  v20.19.*|v20.[2-9][0-9]*|v2[2-9].*|v[3-9][0-9].*) ;;
  *) echo "setup: node $version is too old: the dashboard's build needs Node 20.19 or newer" >&2; exit 1 ;;
esac

command -v pkg-config >/dev/null 2>&1 || missing+=(pkg-config)
if ! command -v pkg-config >/dev/null 2>&1 || ! pkg-config --atleast-version=4.3 libzmq; then
  missing+=(libzmq3-dev)
fi
if [ "${1:-}" = test ] && ! command -v chromium >/dev/null 2>&1; then
  missing+=(chromium fonts-dejavu-core) # without any font it draws nothing
fi
if [ "${1:-}" = test ] && ! command -v redis-server >/dev/null 2>&1; then
  missing+=(redis-server)
fi

install_debs() {
  echo "setup: installing ${missing[*]}"
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "setup: no apt-get here; install by hand: ${missing[*]} (libzmq 4.3 or newer with its headers)" >&2
    exit 1
  fi
  if [ "$(id -u)" -ne 0 ]; then
    echo "setup: not root; run: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  local log
  log=$(mktemp)
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "setup: apt-get failed; its last lines are above" >&2
    exit 1
  fi
  rm -f "$log"
}
[ ${#missing[@]} -eq 0 ] || install_debs

# npm's own note of what it installed is as new as the lock file it installed.
install_npm() { # folder, what it is
  if [ "$1/node_modules/.package-lock.json" -nt "$1/package-lock.json" ]; then return; fi
  echo "setup: installing $2"
  local log
  log=$(mktemp)
  if ! (cd "$1" && npm ci --no-audit --no-fund) >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "setup: npm failed in $1; its last lines are above. Is the registry reachable?" >&2
    exit 1
  fi
  touch "$1/node_modules/.package-lock.json"
  rm -f "$log"
}
install_npm indexer/history/embedded "the ClickHouse engine (540 MB, in indexer/history/embedded/node_modules)"
install_npm web/ui "the dashboard's libraries (in web/ui/node_modules)"
# npm says nothing when it has no package for this machine.
if [ -z "${KVSTRATA_CHDB:-}" ] && ! ls indexer/history/embedded/node_modules/@chdb/lib-linux-*-gnu/libchdb.so >/dev/null 2>&1; then
  echo "setup: npm has no ClickHouse engine for $(uname -m); name a libchdb.so 26.7.3 by KVSTRATA_CHDB" >&2
  exit 1
fi
