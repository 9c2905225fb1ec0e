"""Writes what SGLang's own code yields to ../subscriber/testdata/sglang/{golden,frames}.json.

golden.json has batches: those of its event classes, and those that its radix cache and recorder
make (radix-…). frames.json has the frames of its ZeroMQ publisher, live and replayed. Run by any
Python; it runs itself in each venv. --check [NAME…] compares with the files instead.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "sglang"
VENVS = ("sglang-first", "sglang-array", "sglang-salt", "sglang-map", "sglang")

TS = 1.5
TOKENS = list(range(101, 1617, 101))
POSITIVE, NEGATIVE = 8635429971592222890, -2360060374177730597
SIGNED = [0, 127, 128, 65535, 2**32, 2**63 - 1, -1, -32, -33, -32769, -(2**31) - 1, -(2**63)]
BIGRAMS = [[101, 202], [202, 303], [303, 404], [404, 505]]
MEDIA = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")


def stored(**fields):
    """Describes a BlockStored of one block, with some fields set otherwise."""
    base = {"block_hashes": [POSITIVE], "token_ids": TOKENS, "block_size": 16}
    return {"type": "BlockStored", **base, **fields}


def removed(**fields):
    """Describes a BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": [POSITIVE, NEGATIVE], **fields}


CLEARED = {"type": "AllBlocksCleared"}
CHUNK = {
    "block_hashes": [POSITIVE, NEGATIVE],
    "parent_block_hash": NEGATIVE,
    "token_ids": TOKENS * 2,
}
EVERY = {"medium": "GPU", "cache_salt": "salt-1", "session_id": "s-42", "lora_name": "my-lora"}

# name, rank, events. A release whose classes lack a field of a case has no entry for it.
CASES = [
    ("stored-minimal", 0, [stored()]),
    ("stored-negative-hash", 0, [stored(block_hashes=[NEGATIVE], medium="GPU")]),
    ("stored-two-blocks", 0, [stored(**CHUNK, medium="GPU")]),
    ("stored-signed-hashes", 0, [stored(block_hashes=SIGNED, parent_block_hash=-(2**63))]),
    *((f"stored-{m.lower()}", 0, [stored(medium=m)]) for m in MEDIA),
    ("stored-lora-id", 0, [stored(lora_id=7, medium="GPU")]),
    ("stored-salt", 0, [stored(medium="GPU", cache_salt="salt-1")]),
    ("stored-salt-no-medium", 0, [stored(cache_salt="é" * 20)]),
    ("stored-session", 0, [stored(medium="GPU", session_id="s-42")]),
    ("stored-lora-name", 0, [stored(medium="GPU", lora_name="my-lora")]),
    ("stored-every-field", 0, [stored(**CHUNK, lora_id=7, **EVERY)]),
    ("stored-bigrams", 0, [stored(token_ids=BIGRAMS, block_size=4, medium="GPU")]),
    ("removed-minimal", 0, [removed()]),
    *((f"removed-{m.lower()}", 0, [removed(medium=m)]) for m in MEDIA),
    ("cleared", 0, [CLEARED]),
    ("several-events", 3, [CLEARED, stored(**CHUNK, medium="GPU"), removed(medium="GPU")]),
    ("rank-nil", None, [stored(medium="GPU")]),
    ("no-events", 0, []),
]

ADAPTER = "0123456789abcdef0123456789abcdef"


def radix(sg):
    """Yields (name, events) of a story that SGLang's radix cache lives through, page size 4."""
    if not sg.HAS_RECORDER:
        return
    tree = sg.Radix()
    tree.insert(range(1, 11))  # two pages; the rest of the tokens fills none
    yield "radix-start", tree.take()
    tree.insert(range(1, 17))
    yield "radix-longer", tree.take()
    tree.insert([*range(1, 9), 91, 92, 93, 94])
    yield "radix-branch", tree.take()
    tree.insert(range(1, 17))
    yield "radix-again", tree.take()
    tree.evict(1)
    yield "radix-evict", tree.take()
    tree.evict(100)
    yield "radix-evict-all", tree.take()
    tree.insert(range(5, 9))
    tree.reset()
    yield "radix-reset", tree.take()

    tree = sg.Radix()
    tree.insert(range(1, 9))
    tree.take()
    tree.record("CPU_PINNED")
    yield "radix-host", tree.take()
    tree.record("GPU", removed=True)
    yield "radix-demote", tree.take()
    tree.record("GPU")
    yield "radix-load-back", tree.take()
    tree.record("CPU_PINNED", removed=True)
    yield "radix-host-evict", tree.take()

    tree = sg.Radix(eagle=True)
    tree.insert(range(1, 10))
    yield "radix-eagle", tree.take()
    tree.evict(100)
    yield "radix-eagle-evict", tree.take()

    tree = sg.Radix()
    tree.insert(range(1, 9), extra=ADAPTER)
    yield "radix-extra-key", tree.take()

    if not sg.WITH_METADATA and "cache_salt" not in sg.CLASSES["BlockStored"].__struct_fields__:
        return
    tree = sg.Radix()
    tree.insert(range(1, 9), salt="salt-1")
    yield "radix-salt", tree.take()
    tree.evict(100)
    yield "radix-salt-evict", tree.take()

    if "dynamo_kv_event_format" not in tree.known:
        return
    for name, dynamo in (("radix-lora", False), ("radix-dynamo-lora", True)):
        tree = sg.Radix(dynamo=dynamo, adapters=[(ADAPTER, "my-lora")])
        tree.insert(range(1, 9), extra=ADAPTER)
        yield name, tree.take()
        tree.evict(100)
        yield name + "-evict", tree.take()
    tree = sg.Radix(dynamo=True, adapters=[(ADAPTER, "my-lora")])
    tree.insert(range(1, 9), extra=ADAPTER, salt="salt-1")
    yield "radix-dynamo-lora-salt", tree.take()
    tree = sg.Radix(dynamo=True)
    tree.insert(range(1, 9), salt="salt-1")
    yield "radix-dynamo-salt", tree.take()
    tree.insert(range(1, 9))
    yield "radix-dynamo-plain", tree.take()


def golden(sg, msgspec):
    """Encodes every case and every step of the story with SGLang's classes."""
    encoder = msgspec.msgpack.Encoder()
    is_array = sg.events.KVCacheEvent.__struct_config__.array_like
    batches = []
    for name, rank, docs in CASES:
        built = [sg.build(doc) for doc in docs]
        if None not in built:
            batches.append((name, rank, built))
    batches += [(name, 0, events) for name, events in radix(sg)]
    for name, rank, events in batches:
        batch = sg.events.KVEventBatch(ts=TS, events=events, attn_dp_rank=rank)
        described = [sg.describe(event) for event in events]
        yield {
            "name": name,
            "version": sg.WHEEL_VERSION,
            "form": "array" if is_array else "map",
            "hex": encoder.encode(batch).hex(),
            "batch": {"ts": TS, "dp_rank": rank, "events": described},
        }


def frames(sg):
    """Yields the frames that a subscriber and a DEALER see of SGLang's publisher of rank 2."""
    import zmq

    context = zmq.Context.instance()
    publisher = sg.events.ZmqEventPublisher(
        attn_dp_rank=2,
        endpoint="inproc://live",
        replay_endpoint="inproc://replay",
        topic="kv-events",
    )
    live, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    live.subscribe(b"")
    live.connect("inproc://live_dp2")
    dealer.connect("inproc://replay_dp2")

    def read(socket, kind, n):
        for _ in range(n):
            if not socket.poll(10000):
                raise SystemExit(f"no {kind} frames from SGLang's publisher")
            parts = [part.hex() for part in socket.recv_multipart()]
            yield {"version": sg.WHEEL_VERSION, "kind": kind, "frames": parts}

    for n in range(3):
        event = sg.build(stored(block_hashes=[n], medium="GPU"))
        publisher.publish(sg.events.KVEventBatch(ts=TS + n, events=[event]))
    yield from read(live, "live", 3)
    dealer.send_multipart([b"", (1).to_bytes(8, "big")])
    yield from read(dealer, "replay", 2)
    yield from read(dealer, "end", 1)
    publisher.shutdown()


def emit():
    """Prints this venv's entries; runs inside a venv."""
    import msgspec

    import sgevents as sg

    print(json.dumps({"golden": list(golden(sg, msgspec)), "frames": list(frames(sg))}))


def gather(venvs) -> dict:
    """Returns the entries that each venv's own code yields, in the order of the files."""
    files = {"golden": [], "frames": []}
    for venv in venvs:
        command = [HERE / ".venv" / venv / "bin" / "python", __file__, "--emit"]
        done = subprocess.run(command, check=True, capture_output=True)
        docs = json.loads(done.stdout)
        for name, entries in docs.items():
            files[name] += entries
    return files


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", metavar="NAME", choices=VENVS, help="compare")
    parser.add_argument("--emit", action="store_true", help="print this venv's entries")
    args = parser.parse_args()
    if args.emit:
        emit()
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    for name, entries in gather([v for v in VENVS if not args.check or v in args.check]).items():
        path = OUT / f"{name}.json"
        versions = {entry["version"] for entry in entries}
        if args.check is None:
            lines = (json.dumps(entry, ensure_ascii=False) for entry in entries)
            path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
            print(f"sglang/{path.name}: {len(entries)} entries")
        elif [e for e in json.loads(path.read_text()) if e["version"] in versions] != entries:
            print(f"sglang/{path.name} differs from what SGLang's code yields", file=sys.stderr)
            return 1
        else:
            said = f"{len(entries)} entries of {', '.join(sorted(versions))} are right"
            print(f"sglang/{path.name}: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
