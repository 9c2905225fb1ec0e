"""Writes what vLLM's own block pool and offloading connector emit to
../subscriber/testdata/vllm/offload.json, in the form of golden.json.

pool-…: BlockPool, which emits the events of the GPU. offload-…: OffloadingEventsTracker, which
turns the offloading tiers' events into vLLM's, described or as placeholders. 0.26.0 is the one
release that calls its tiers FS and OBJ. Run by any Python; --check compares with the file instead.
"""

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "vllm" / "offload.json"
VENVS = ("offload", "new")

BLOCK = 4
TOKENS = list(range(101, 133))
DIGESTS = [hashlib.sha256(bytes([n])).digest() for n in range(8)]
LORA = types.SimpleNamespace(adapter_id=7, name="my-lora", lora_name="my-lora", lora_path="/lora")
FULL, WINDOW = ("full_attention", None), ("sliding_window", 4096)


def request(lora=None, salt=None, session=None):
    """Returns as much of a vLLM Request as the event code reads."""
    return types.SimpleNamespace(
        block_hashes=DIGESTS,
        all_token_ids=TOKENS,
        lora_request=lora,
        cache_salt=salt,
        session_id=session,
        mm_features=[],
        prompt_embeds=None,
    )


def pool(kv):
    """Yields what the block pool emits, as (name, events)."""
    module = importlib.import_module("vllm.v1.core.block_pool")

    def new(blocks=8):
        return module.BlockPool(blocks, True, BLOCK, enable_kv_cache_events=True)

    gpu = new()
    blocks = gpu.get_new_blocks(6)
    gpu.cache_full_blocks(request(), blocks, 0, 2, BLOCK, 0)
    yield "pool-stored", gpu.take_events()
    gpu.cache_full_blocks(request(), blocks, 2, 4, BLOCK, 0)
    yield "pool-stored-more", gpu.take_events()
    # What kv_cache_report_mode "full" sends of a prefix that was found.
    gpu.emit_cached_block_events(request(), 3, BLOCK, 0)
    yield "pool-reported-again", gpu.take_events()
    gpu.free_blocks(reversed(blocks))
    gpu.get_new_blocks(7)
    yield "pool-evicted", gpu.take_events()
    gpu = new()
    blocks = gpu.get_new_blocks(4)
    gpu.cache_full_blocks(request(LORA, "salt-1", "s-42"), blocks, 0, 2, BLOCK, 0)
    yield "pool-lora-salt-session", gpu.take_events()
    mask = [False, False, True, True]
    gpu = new()
    blocks = gpu.get_new_blocks(4)
    gpu.cache_full_blocks(request(), blocks, 0, 4, BLOCK, 1, block_mask=mask)
    yield "pool-window", gpu.take_events()
    gpu = new()
    blocks = gpu.get_new_blocks(4)
    gpu.cache_full_blocks(request(), blocks, 0, 2, BLOCK, 1, block_mask=[False, False])
    yield "pool-window-none", gpu.take_events()
    # One hash of two physical blocks: stored twice, removed twice.
    gpu = new(5)
    one, two = gpu.get_new_blocks(2), gpu.get_new_blocks(2)
    gpu.cache_full_blocks(request(), one, 0, 1, BLOCK, 0)
    gpu.cache_full_blocks(request(), two, 0, 1, BLOCK, 0)
    gpu.free_blocks([*one, *two])
    gpu.get_new_blocks(4)
    yield "pool-two-copies", gpu.take_events()
    gpu = new()
    blocks = gpu.get_new_blocks(2)
    gpu.cache_full_blocks(request(), blocks, 0, 1, BLOCK, 0)
    gpu.free_blocks(blocks)
    gpu.reset_prefix_cache()
    yield "pool-reset", gpu.take_events()


def group(kv, index, spec, blocks_per_chunk=1, window=None):
    """Returns as much of a group's configuration as the tracker reads."""
    return types.SimpleNamespace(
        group_idx=index,
        tokens_per_block=BLOCK,
        tokens_per_chunk=BLOCK * blocks_per_chunk,
        hashes_per_chunk=blocks_per_chunk,
        kv_event_group_spec=kv.offloading.OffloadingEventGroupSpec(*spec),
        sliding_window_size_in_chunks=window,
        offloaded_block_size=BLOCK * blocks_per_chunk,
    )


def offload(kv):
    """Yields what the offloading connector emits, as (name, events)."""
    base = kv.base
    newer = hasattr(base, "Medium")
    media = ("CPU", "STORAGE") if newer else ("CPU", "FS", "OBJ")

    def event(medium, *keys, removed=False, **more):
        named = base.Medium(medium) if newer else medium
        return base.OffloadingEvent(keys=list(keys), medium=named, removed=removed, **more)

    def key(block, index=0):
        return base.make_offload_key(DIGESTS[block], index)

    def tracker(described):
        config = base.OffloadingKVEventsConfig(True, described)
        return kv.offloading.OffloadingEventsTracker(config)

    def taken(tracker, *events):
        return list(tracker.take_events(events))

    local, remote = base.Locality("LOCAL"), base.Locality("REMOTE")
    plain = tracker(False)
    for medium in media:
        low = medium.lower()
        stored = taken(plain, event(medium, key(0), key(1)))
        yield f"offload-placeholder-{low}", stored
        removed = event(medium, key(0), key(1), removed=True)
        yield f"offload-placeholder-{low}-removed", taken(plain, removed)
    groups = event("CPU", key(0), key(1, 1), key(2), removed=True)
    yield "offload-placeholder-groups-removed", taken(plain, groups)
    yield "offload-placeholder-window", taken(plain, event("CPU", key(3, 1)))

    described = tracker(True)
    full, window = group(kv, 0, FULL, 2), group(kv, 1, WINDOW, 2, window=2)
    for chunk in range(2):
        described.record_store(request(), full, chunk, key(2 * chunk + 1))
        described.record_store(request(), window, chunk, key(2 * chunk + 1, 1))
    stored = event("CPU", key(1), key(3), key(3, 1))
    yield "offload-described", taken(described, stored)
    second = media[-1]
    more = {"ownership": "kvcr", "removal_expected": True} if newer else {}
    copies = event(second, key(1), locality=remote, **more)
    yield "offload-described-second-tier", taken(described, copies)
    yield "offload-described-local", taken(described, event(second, key(3), locality=local))
    gone = event("CPU", key(1), key(3), key(3, 1), removed=True)
    yield "offload-described-removed", taken(described, gone)
    if newer:
        gone = event(second, key(1), removed=True, locality=remote, ownership="kvcr")
        yield "offload-described-second-tier-removed", taken(described, gone)
    described.record_store(request(LORA), group(kv, 0, FULL), 2, key(2))
    yield "offload-described-lora", taken(described, event("CPU", key(2)))
    yield "offload-described-unknown", taken(described, event("CPU", key(7)))


def emit():
    """Prints this venv's entries; runs inside a venv."""
    import msgspec

    import kvevents as kv

    for name in ("torch", "numpy"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = lambda attribute: type(attribute, (), {})
    package = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.events"
    kv.offloading = importlib.import_module(package)
    kv.offloading.logger = types.SimpleNamespace(warning_once=lambda *_: None)
    kv.base = importlib.import_module("vllm.v1.kv_offload.base")
    importlib.import_module("vllm.v1.core.kv_cache_utils").init_none_hash(
        importlib.import_module("vllm.utils.hashing").sha256
    )
    steps = list(offload(kv))
    if kv.WHEEL_VERSION != "0.26.0":
        steps = list(pool(kv)) + steps
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(type=kv.events.KVEventBatch)
    entries = []
    for name, events in steps:
        batch = kv.events.KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)
        payload = encoder.encode(batch)
        entries.append({
            "name": name,
            "version": kv.WHEEL_VERSION,
            "form": "map",
            "hex": payload.hex(),
            "batch": kv.batch_to_json(decoder.decode(payload)),
        })  # fmt: skip
    print(json.dumps(entries))


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", metavar="NAME", choices=VENVS, help="compare")
    parser.add_argument("--emit", action="store_true", help="print this venv's entries")
    args = parser.parse_args()
    if args.emit:
        emit()
        return 0
    entries = []
    for venv in args.check or VENVS:
        command = [HERE / ".venv" / venv / "bin" / "python", __file__, "--emit"]
        entries += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if args.check is None:
        OUT.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
        print(f"vllm/{OUT.name}: {len(entries)} entries")
        return 0
    versions = {entry["version"] for entry in entries}
    there = [entry for entry in json.loads(OUT.read_text()) if entry["version"] in versions]
    if there != entries:
        print(f"vllm/{OUT.name} differs from what vLLM's code yields", file=sys.stderr)
        return 1
    print(f"vllm/{OUT.name}: {len(entries)} entries of {', '.join(sorted(versions))} are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
