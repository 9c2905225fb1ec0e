"""Runs LMCache's own cache server on a free port and prints {"port": N}.

Of a release that still has it, --v0 runs the server whose frames tell no content.
"""

import argparse
import contextlib
import importlib
import json
import sys

import lmstubs  # noqa: F401  # serves lmcache.*


def main():
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--v0", action="store_true")
    name = "lmcache.server" if parser.parse_args().v0 else "lmcache.v1.server"
    server = importlib.import_module(name + ".__main__").LMCacheServer("127.0.0.1", 0, "cpu")
    print(json.dumps({"port": server.server_socket.getsockname()[1]}), flush=True)
    with contextlib.redirect_stdout(sys.stderr):  # the old one prints
        server.run()


if __name__ == "__main__":
    main()
