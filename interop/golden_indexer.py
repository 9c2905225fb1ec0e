"""Writes what Dynamo's own standalone indexer answers to ../indexer/prefix/kvindexer/testdata.

golden.json has every kind of request, good and bad, in order, with its answer: status, content
type, Allow header and body. Ports are those of nobody. --check compares instead.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "indexer" / "prefix" / "kvindexer" / "testdata" / "golden.json"
REGISTER = {
    "instance_id": 1,
    "endpoint": "tcp://127.0.0.1:1",
    "model_name": "m",
    "block_size": 4,
}
UNREGISTER = {"instance_id": 1, "model_name": "m"}
QUERY = {"token_ids": [1, 2, 3, 4], "model_name": "m"}
HASHES = {"block_hashes": [1, 2], "model_name": "m"}
PEER = {"url": "http://127.0.0.1:1"}


def without(doc: dict, name: str) -> dict:
    """Returns the document without a field."""
    return {key: value for key, value in doc.items() if key != name}


def plain():
    """Yields requests of the paths themselves: (method, path, body)."""
    for method in ("GET", "HEAD", "POST"):
        yield method, "/health", {} if method == "POST" else None
    for path in ("/", "/nope", "/health/", "/ready", "/test/pause_listener"):
        yield "GET", path, None
    for path in ("/workers", "/peers", "/dump"):
        yield "GET", path, None
        yield "POST", path, {}
    for path in ("/register", "/unregister", "/query", "/query_by_hash", "/register_peer"):
        yield "GET", path, None
    yield "PUT", "/query", QUERY
    for text in (None, "", "{", "[1]", "[]", "3", "{} x", '{"a":1,}'):
        yield "POST", "/register", text
    yield "POST", "/query", json.dumps(QUERY) + " x"


def registering():
    """Yields requests that register, each followed by one that takes it back."""
    for name in REGISTER:
        yield "POST", "/register", without(REGISTER, name)
    changes = [
        ("instance_id", ("1", -1, 2**64, 1.5, None, 2**64 - 1)),
        ("block_size", (0, -1, 2**32, "4", 1)),
        ("endpoint", ("", "127.0.0.1:1", "http://a:1", "tcp://127.0.0.1", 5)),
        ("endpoint", ("tcp://127.0.0.1:99999", "ipc:///nowhere", "tcp://*:1", "tcp://127.0.0.1:x")),
        ("model_name", ("", 5, "meta/Llama.3 1")),
        ("replay_endpoint", ("", "x", None, "tcp://127.0.0.1:2", 5, "tcp://127.0.0.1")),
        ("dp_rank", (-1, None, 2**32, "0", 3)),
        ("routing_group", ("", None, 5, "g")),
        ("tenant_id", ("t", 5, None)),
        ("additional_salt", ("x", 5, None)),
        ("additionalsalt", ("x",)),
        ("unknown", (1,)),
    ]
    for name, values in changes:
        for value in values:
            doc = {**REGISTER, name: value}
            yield "POST", "/register", doc
            back = {key: doc[key] for key in UNREGISTER}
            yield "POST", "/unregister", back


def registry():
    """Yields requests about what is registered."""
    yield "POST", "/register", REGISTER
    yield "POST", "/register", REGISTER
    yield "POST", "/register", {**REGISTER, "endpoint": "tcp://127.0.0.1:3"}
    yield "POST", "/register", {**REGISTER, "dp_rank": 1, "block_size": 8}
    second = {"dp_rank": 1, "endpoint": "tcp://127.0.0.1:2", "replay_endpoint": "tcp://127.0.0.1:3"}
    yield "POST", "/register", {**REGISTER, **second}
    yield "POST", "/register", {**REGISTER, "model_name": "other"}
    yield "POST", "/register", {**REGISTER, "routing_group": "g"}
    yield "POST", "/register", {**REGISTER, "instance_id": 2}
    group = {"instance_id": 3, "routing_group": "g", "block_size": 8}
    yield "POST", "/register", {**REGISTER, **group}
    filters = ("", "model_name=m", "model_name=x", "routing_group=g", "tenant_id=g", "foo=1")
    for text in (*filters, "model_name=m&routing_group=g", "model_name=m&model_name=n"):
        yield "GET", "/workers?" + text, None


def queries():
    """Yields queries of prompts that nobody has."""
    for name in QUERY:
        yield "POST", "/query", without(QUERY, name)
    for more in (
        {},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": "x"},
        {"token_ids": [1, 2, 3]},
        {"model_name": "zz"},
        {"routing_group": "zz"},
        {"routing_group": "g"},
        {"routing_group": ""},
        {"routing_group": None},
        {"tenant_id": "g"},
        {"lora_name": "l", "cache_salt": "s"},
        {"lora_name": None, "cache_salt": None},
        {"lora_name": 5},
        {"extra": 1},
    ):
        yield "POST", "/query", {**QUERY, **more}
    for name in HASHES:
        yield "POST", "/query_by_hash", without(HASHES, name)
    for more in (
        {},
        {"cache_salt": "x"},
        {"cache_salt": ""},
        {"cache_salt": None},
        {"cache_salt": "x", "model_name": "zz"},
        {"lora_name": "l"},
        {"block_hashes": []},
        {"block_hashes": [-1, 2**63 - 1]},
        {"block_hashes": [2**63]},
        {"block_hashes": [2**64 - 1]},
        {"block_hashes": ["1"]},
        {"model_name": "zz"},
        {"routing_group": "zz"},
    ):
        yield "POST", "/query_by_hash", {**HASHES, **more}
    yield "GET", "/dump", None


def leaving():
    """Yields requests that end what is registered, and of peers."""
    for name in UNREGISTER:
        yield "POST", "/unregister", without(UNREGISTER, name)
    rank = {"routing_group": "default", "dp_rank": 7}
    for more in (
        {"instance_id": 9},
        {"instance_id": 9, "routing_group": "default"},
        {"instance_id": 9, **rank},
        {"model_name": "x"},
        {"model_name": "x", "routing_group": "default"},
        {"routing_group": "g"},
        {"routing_group": None, "tenant_id": "x", "instance_id": 9},
        {"routing_group": "g", "dp_rank": 0},
        rank,
    ):
        yield "POST", "/unregister", {**UNREGISTER, **more}
    yield "GET", "/workers?model_name=m&routing_group=default", None
    yield "POST", "/unregister", {**UNREGISTER, **rank, "dp_rank": 1}
    yield "GET", "/workers", None
    yield "POST", "/unregister", {**UNREGISTER, **rank, "dp_rank": 0}
    yield "GET", "/workers", None
    yield "POST", "/unregister", {**UNREGISTER, **rank, "dp_rank": 0}
    yield "POST", "/query", QUERY
    yield "POST", "/register", {**REGISTER, "block_size": 8}
    yield "POST", "/unregister", {**UNREGISTER, "instance_id": 2}
    yield "POST", "/query", QUERY
    yield "POST", "/register", {**REGISTER, "block_size": 8}
    yield "POST", "/register", {**REGISTER, "block_size": 8, "dp_rank": 1}
    yield "POST", "/unregister", {**UNREGISTER, "dp_rank": 1}  # no group: all ranks
    yield "GET", "/workers?model_name=m", None
    yield "POST", "/unregister", {"instance_id": 3, "model_name": "m"}
    yield "GET", "/workers", None
    yield "GET", "/dump", None
    yield "POST", "/register_peer", {}
    yield "POST", "/register_peer", {"url": "zzz"}
    yield "POST", "/deregister_peer", {"url": "zzz"}
    for path in ("/register_peer", "/register_peer", "/deregister_peer", "/deregister_peer"):
        yield "POST", path, PEER
        yield "GET", "/peers", None
    yield "POST", "/reopen_logs", None
    yield "GET", "/reopen_logs", None


def ask(port: int, method: str, path: str, body, content_type="application/json") -> dict:
    """Sends a request; returns it with its answer."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text = body if body is None or isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": content_type} if text is not None and content_type else {}
    client.request(method, path, text, headers)
    response = client.getresponse()
    said = response.read().decode()
    client.close()
    kind = response.getheader("content-type")
    return {
        "method": method,
        "path": path,
        "type": headers.get("Content-Type", ""),
        "body": text or "",
        "status": response.status,
        "answer_type": kind or "",
        "allow": response.getheader("allow") or "",
        "answer": json.loads(said) if kind == "application/json" else said,
    }


class Indexer:
    """Dynamo's standalone indexer, as a process."""

    def __init__(self):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        args = ["--port", str(self.port)]
        python = HERE / ".venv" / "dynamo" / "bin" / "python"
        self.process = subprocess.Popen(
            [python, HERE / "dynamo_indexer.py", *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(400):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit("Dynamo's indexer does not listen")

    def close(self):
        self.process.kill()
        self.process.wait()


def gather() -> list:
    """Returns all requests with their answers."""
    indexer = Indexer()
    try:
        entries = []
        for story in (plain, registering, registry, queries, leaving):
            for method, path, body in story():
                if path.startswith("/workers"):
                    time.sleep(0.3)  # a listener that begins is pending for a moment
                entries.append(ask(indexer.port, method, path, body))
        for kind in (None, "text/plain", "application/json; charset=utf-8", "application/x+json"):
            entries.append(ask(indexer.port, "POST", "/query", QUERY, kind))
        return entries
    finally:
        indexer.close()


def stable(entries: list) -> list:
    """Returns the entries with lists of no order sorted."""
    for one in entries:
        if isinstance(one["answer"], list):
            one["answer"].sort(key=json.dumps)
    return entries


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    args = parser.parse_args()
    entries = stable(gather())
    if not args.check:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
        print(f"kvindexer/{OUT.name}: {len(entries)} answers")
        return 0
    if json.loads(OUT.read_text()) != entries:
        print(f"kvindexer/{OUT.name} differs from what Dynamo answers", file=sys.stderr)
        return 1
    print(f"kvindexer/{OUT.name}: {len(entries)} answers are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
