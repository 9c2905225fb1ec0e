"""Writes what Mooncake's own master publishes to ../subscriber/testdata/mooncake/golden.json.

Starts mooncake_master with KV events on free loopback ports, stores and removes objects with
Mooncake's own client, and keeps the ZeroMQ frames. Clocks are replaced by one of the same width,
so that two runs yield the same bytes. --check compares with the file instead.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "mooncake" / "golden.json"
VENV = HERE / ".venv" / "mooncake"

CLOCK = 1790000000000  # milliseconds, eight bytes wide as every clock of these years
FIXED = {
    "kv_events_model_name": "my-model",
    "kv_events_block_size": 64,
    "kv_events_additional_salt": "salt-1",
    "kv_events_lora_name": "my-lora",
    "kv_events_dp_rank": 3,
    "kv_events_tenant_id": "tenant-a",
}
# name, flags of the master
VARIANTS = [
    ("default", {}),
    ("no-legacy", {"kv_events_emit_legacy_compat": "false"}),
    ("no-object-key", {"kv_events_emit_object_key": "false"}),
    ("fixed-fields", FIXED),
]
# What the engines' connectors name their objects; the master does not read them.
KEYS = {
    "decimal": "7876691182959014722",
    "hex": "0x6d4fa0e5fdb93342",
    "vllm": "my-model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@d450abdaf2c9ebdd0e0cbfbc4e24a5c0",
    "sglang": "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72_0_k",
    "lmcache": "my-model@1@0@-6d4fa0e5fdb93342@half",
}


def free_port() -> int:
    """Returns a free port of the loopback."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Master:
    """Mooncake's master with its events, a subscriber, and a client with a segment of memory."""

    def __init__(self, flags: dict):
        import zmq

        rpc, metrics, events = free_port(), free_port(), free_port()
        endpoint = f"tcp://127.0.0.1:{events}"
        args = {
            "rpc_port": rpc,
            "rpc_address": "127.0.0.1",
            "metrics_port": metrics,
            "metrics_host": "127.0.0.1",
            "enable_kv_events": "true",
            "kv_events_bind_endpoint": endpoint,
            "kv_events_backend_id": "store-a",
            **flags,
        }
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(b"")
        monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)
        binary = Path(sysconfig.get_path("purelib")) / "mooncake" / "mooncake_master"
        command = [binary, *(f"--{name}={value}" for name, value in args.items())]
        self.process = subprocess.Popen(command, stdout=sys.stderr)
        if not monitor.poll(20000):
            raise SystemExit("mooncake_master binds no endpoint for KV events")
        self.socket.disable_monitor()
        from mooncake import store

        self.store, self.client = store, store.MooncakeDistributedStore()
        size = 16 << 20
        master = f"127.0.0.1:{rpc}"
        for _ in range(20):
            if not self.client.setup("127.0.0.1", "P2PHANDSHAKE", size, size, "tcp", "", master):
                return
            time.sleep(0.5)
        raise SystemExit("Mooncake's client does not reach the master")

    def frames(self):
        """Yields the frames that came, until none comes for a while."""
        while self.socket.poll(250):
            yield self.socket.recv_multipart()

    def close(self):
        """Ends the client and the master."""
        self.client.close()
        self.process.terminate()
        self.process.wait(20)
        self.socket.close(linger=0)


def story(master):
    """Yields the name of each step, after its effect."""
    client, config = master.client, master.store.ReplicateConfig
    for name, key in KEYS.items():
        yield f"put-{name}", client.put(key, b"x" * 100)
    grouped = config()
    grouped.group_ids, grouped.session_ids = ["g1"], ["s-42"]
    yield "put-group-session", client.put("grouped", b"x" * 100, grouped)
    yield "put-again", client.put("grouped", b"y" * 100, grouped)
    yield "upsert", client.upsert("grouped", b"z" * 100, grouped)
    for key in KEYS.values():
        client.remove(key, True)
    yield "remove-five", 0
    yield "remove-all", 0 if client.remove_all(True) == 1 else -1


def meaning(event: dict) -> dict:
    """Returns what an event says, in the words of every dialect."""
    return {
        "kind": event["event_type"],
        "event_id": event["event_id"],
        "key": event.get("object_key"),
        "hashes": event.get("seq_hashes"),
        "parent": event.get("parent_hash"),
        "tokens": event.get("token_ids"),
        "base": event.get("base_block_idx"),
        **{
            name: event.get(name)
            for name in ("medium", "block_size", "model_name", "lora_name", "additional_salt")
        },
        **{
            name: event.get(name)
            for name in ("tenant_id", "backend_id", "group_id", "session_id", "dp_rank")
        },
    }


def reference():
    """Yields events as builds before 0.3.14 sent them, after the description; no wheel has one.

    Those read object keys that were decimal or 0x numbers, and had them as hashes.
    """
    for name, medium, seq_hash in (
        ("stored", "cpu", 7876691182959014722),
        ("stored", "disk", 2**64 - 2),
        ("removed", "disk", 2**64 - 2),
        ("stored", "cpu", None),
    ):
        signed = seq_hash and (seq_hash - 2**64 if seq_hash >= 2**63 else seq_hash)
        event = {
            "event_id": 1,
            "timestamp": CLOCK,
            "event_type": name,
            "type": {"stored": "BlockStored", "removed": "BlockRemoved"}[name],
            **dict.fromkeys(("model_name", "block_size", "additional_salt", "lora_name")),
            "tenant_id": "default",
            "backend_id": "store-a",
            "group_id": None,
            "medium": medium,
            "dp_rank": None,
            "object_key": "an/object" if seq_hash is None else str(seq_hash),
            "seq_hashes": [] if seq_hash is None else [seq_hash],
            "block_hashes": [] if seq_hash is None else [signed],
            "base_block_idx": 0 if name == "stored" else None,
        }
        if name == "stored":
            event |= dict.fromkeys(("parent_hash", "token_ids", "parent_block_hash"))
        kind = "-no-hash" if seq_hash is None else ""
        yield f"reference/{name}-{medium}{kind}", event


def capture():
    """Prints the entries; runs inside the venv."""
    import msgpack

    version, entries = metadata.version("mooncake-transfer-engine-cuda13"), []
    for variant, flags in VARIANTS:
        master = Master(flags)
        for step, status in story(master):
            if status != 0:
                raise SystemExit(f"Mooncake's client says {status} to {variant}/{step}")
            for topic, seq, payload in master.frames():
                clock = msgpack.unpackb(payload)[0]
                payload = payload.replace(clock.to_bytes(8, "big"), CLOCK.to_bytes(8, "big"))
                ts, events, rank = msgpack.unpackb(payload)
                entries.append({
                    "name": f"{variant}/{step}",
                    "version": version,
                    "source": "captured",
                    "flags": flags,
                    "topic": topic.decode(),
                    "seq": int.from_bytes(seq, "big"),
                    "hex": payload.hex(),
                    "ts_ms": ts,
                    "dp_rank": rank,
                    "events": [meaning(event) for event in events],
                })  # fmt: skip
        master.close()
    for name, event in reference():
        entries.append({
            "name": name,
            "version": "3b5a5941",
            "source": "reference",
            "flags": {},
            "topic": "",
            "seq": 1,
            "hex": msgpack.packb([CLOCK, [event], 0]).hex(),
            "ts_ms": CLOCK,
            "dp_rank": 0,
            "events": [meaning(event)],
        })  # fmt: skip
    print(json.dumps(entries))


def run() -> list:
    """Returns the entries that a capture in the venv yields."""
    libraries = [VENV / "lib" / "native", *VENV.glob("lib/python*/site-packages/nvidia/cu13/lib")]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    command = [VENV / "bin" / "python", __file__, "--capture"]
    done = subprocess.run(command, check=False, capture_output=True, env=env)
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        raise SystemExit("Mooncake's master or client failed; its log is above")
    return json.loads(done.stdout)


def flat(entries: list) -> list:
    """Returns every event by itself: which ones share a batch depends on the clock."""
    return [
        (entry["name"], entry["version"], entry["topic"], entry["dp_rank"], event)
        for entry in entries
        for event in entry["events"]
    ]


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    parser.add_argument("--capture", action="store_true", help="print the entries")
    args = parser.parse_args()
    if args.capture:
        # CUDA's driver, which is not there, is only looked for when it is called.
        sys.setdlopenflags(os.RTLD_LAZY)
        capture()
        return 0
    entries = run()
    if not args.check:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
        print(f"mooncake/{OUT.name}: {len(entries)} entries")
        return 0
    there = json.loads(OUT.read_text())
    same = {entry["name"]: entry["hex"] for entry in there}
    equal = sum(same.get(entry["name"]) == entry["hex"] for entry in entries)
    if flat(there) != flat(entries):
        print(f"mooncake/{OUT.name} differs from what Mooncake's master publishes", file=sys.stderr)
        return 1
    print(f"mooncake/{OUT.name}: {len(entries)} entries are right, {equal} of them byte by byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
