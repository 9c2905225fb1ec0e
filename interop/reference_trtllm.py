"""Writes ../subscriber/testdata/trtllm/reference.json: TensorRT-LLM's events, made by hand.

PyPI has no wheel of TensorRT-LLM, only stubs that fetch one from elsewhere, so these are not what
its code yields but what its sources say (event serializer of 1.2, fields of the V2 manager and
streaming publisher of September 2026). Two dialects: the buffered events, in JSON, and the
streaming ones, in msgpack. --check compares with the file. Runs in the venv called new.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "trtllm" / "reference.json"
HASHES = [11066090714971094433, 8162514883595054550]
DIGESTS = ["d450abdaf2c9ebdd0e0cbfbc4e24a5c07ff71dcab37be7426d4fa0e5fdb93342", "0d" * 32]
MM = {"type": "mm_key", "hash": "0123456789abcdef" * 4, "start_offset": 3}


def block(name, tokens, extra=0, level=0, priority=35, **more):
    """Returns a stored block."""
    return {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra} for token in tokens
        ],
        "cache_level": level,
        "priority": priority,
        **more,
    }


def stored(*blocks, parent=None):
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def updated(name, level=None, priority=None):
    """Returns an update; level and priority are (old, new)."""

    def diff(change):
        return change and {
            "type": "event_diff",
            "new_value": change[1],
            "old_value": change[0],
        }

    return {
        "type": "updated",
        "block_hash": name,
        "cache_level": diff(level),
        "priority": diff(priority),
    }


# name, data, fields of the event beside event_id, data and window_size.
BUFFERED = [
    ("created", {"type": "created", "num_blocks_per_cache_level": [128, 1024]}, {}),
    ("stored", stored(block(HASHES[0], [1, 2, 3, 4]), block(HASHES[1], [5, 6, 7, 8])), {}),
    ("stored-parent", stored(block(HASHES[1], [5, 6, 7, 8]), parent=HASHES[0]), {}),
    ("stored-host", stored(block(HASHES[0], [1, 2, 3, 4], level=1)), {}),
    ("stored-extra-id", stored(block(HASHES[0], [1, 2, 3, 4], extra=9)), {}),
    ("stored-rank", stored(block(HASHES[0], [1, 2, 3, 4])), {"attention_dp_rank": 2}),
    ("stored-mm", stored(block(HASHES[0], [1, 2, 3, 4], mm_keys=[MM])), {}),
    (
        "stored-v2",
        stored(
            block(DIGESTS[1], [5, 6, 7, 8], mm_keys=[], cache_salt="salt-1", lora_id=7),
            parent=DIGESTS[0],
        ),
        {"attention_dp_rank": 0, "hash_algo": "v2_sha256", "layer_group_id": 1},
    ),
    (
        "stored-v2-64",
        stored(block(HASHES[0], [1, 2, 3, 4], mm_keys=[], cache_salt=None)),
        {"hash_algo": "v2_sha256_64", "layer_group_id": 0},
    ),
    ("removed", {"type": "removed", "block_hashes": HASHES}, {}),
    (
        "removed-v2",
        {"type": "removed", "block_hashes": DIGESTS},
        {"hash_algo": "v2_sha256", "layer_group_id": 1},
    ),
    ("updated-offloaded", updated(HASHES[0], level=(0, 1)), {}),
    ("updated-onboarded", updated(HASHES[0], level=(1, 0)), {}),
    ("updated-priority", updated(HASHES[0], priority=(35, 80)), {}),
    ("updated-both", updated(HASHES[0], level=(0, 1), priority=(35, 1)), {}),
]


def meaning(event: dict) -> dict:
    """Returns what a buffered event says, in plain fields."""
    data = event["data"]
    blocks = data.get("blocks", [])
    level = data.get("cache_level") or {}
    names = [b["block_hash"] for b in blocks] or data.get("block_hashes", [])
    return {
        "kind": data["type"],
        "event_id": event["event_id"],
        "window_size": event["window_size"],
        "dp_rank": event.get("attention_dp_rank"),
        "hash_algo": event.get("hash_algo"),
        "layer_group": event.get("layer_group_id"),
        "hashes": [data["block_hash"]] if "block_hash" in data else names,
        "parent": data.get("parent_hash"),
        "tokens": [[token["token_id"] for token in b["tokens"]] for b in blocks],
        "levels": [b["cache_level"] for b in blocks],
        "salts": [b.get("cache_salt") for b in blocks],
        "level_old": level.get("old_value"),
        "level_new": level.get("new_value"),
    }


def buffered():
    """Yields the buffered events, and a list of two, as the HTTP endpoint answers."""
    events = []
    for number, (name, data, more) in enumerate(BUFFERED):
        event = {"event_id": number, "data": data, "window_size": 4096, **more}
        events.append(event)
        yield {
            "name": f"buffered-{name}",
            "source": "reference",
            "form": "json",
            "text": json.dumps(event),
            "events": [meaning(event)],
        }
    for name, some in (("list", [events[0], events[1]]), ("list-empty", [])):
        yield {
            "name": f"buffered-{name}",
            "source": "reference",
            "form": "json",
            "text": json.dumps(some),
            "events": [meaning(event) for event in some],
        }


def streaming():
    """Yields batches of the streaming publisher, in the form of vLLM's golden.json."""
    import msgspec

    base = {
        "type": "BlockStored",
        "block_hashes": [HASHES[1], -7380653358738457183],
        "parent_block_hash": None,
        "token_ids": list(range(1, 9)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    key = {**MM, "uuid": "image-1"}
    removed = {"type": "BlockRemoved", "block_hashes": [-7380653358738457183], "medium": "GPU"}
    for name, rank, events in (
        ("stored", 0, [base]),
        ("stored-parent-lora", 1, [{**base, "parent_block_hash": -5, "lora_id": 7}]),
        ("stored-mm", 0, [{**base, "mm_keys": [[key], []]}]),
        ("stored-text-token", 0, [{**base, "token_ids": [1, 2, 3, "ab" * 32, 5, 6, 7, 8]}]),
        ("removed", 0, [removed]),
        ("cleared", 0, [{"type": "AllBlocksCleared"}]),
        ("several", 3, [base, removed]),
    ):
        yield {
            "name": f"streaming-{name}",
            "source": "reference",
            "form": "map",
            "hex": msgspec.msgpack.encode([1.5, events, rank]).hex(),
            "batch": {"ts": 1.5, "dp_rank": rank, "events": events},
        }


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare")
    parser.add_argument("--emit", action="store_true", help="print the entries")
    args = parser.parse_args()
    if args.emit:
        print(json.dumps([*buffered(), *streaming()]))
        return 0
    command = [HERE / ".venv" / "new" / "bin" / "python", __file__, "--emit"]
    entries = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    text = "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n"
    if not args.check:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(text)
        print(f"trtllm/{OUT.name}: {len(entries)} entries")
    elif OUT.read_text() != text:
        print(f"trtllm/{OUT.name} differs from what this script writes", file=sys.stderr)
        return 1
    else:
        print(f"trtllm/{OUT.name}: {len(entries)} entries are as written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
