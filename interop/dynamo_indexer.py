"""Runs Dynamo's own standalone indexer: what python -m dynamo.indexer calls. --help tells its flags."""

import sys

from dynamo import _core

if __name__ == "__main__":
    _core.run_kv_indexer(sys.argv[1:])
