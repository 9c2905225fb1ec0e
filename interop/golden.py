"""Writes ../subscriber/testdata/vllm/{golden,hashes}.json with vLLM's own code.

Run by any Python; it runs itself in each venv of `setup.sh all`. With --check it compares
with the files that are there and exits 1 when they differ; --check NAME… compares only the
entries of those venvs.
"""

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "vllm"
VENVS = ("first", "older", "old", "mid", "new")
HASHED = ("old", "new")

HASH = 7876691182959014722
TOKENS = list(range(101, 1617, 101))
DIGEST = {"hex": "d450abdaf2c9ebdd0e0cbfbc4e24a5c07ff71dcab37be7426d4fa0e5fdb93342"}
DIGEST16 = {"hex": "363a30eaa81cfc9f9992a6dfe619bda1"}
WIDTHS = [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32]
HASHES = WIDTHS + [2**63 - 1, 2**63, 2**64 - 1]
NEGATIVE = [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)]
EXTRA = [["my-lora", ["abc", 3], "salt-1", DIGEST], None, [["abc", -2]]]


def stored(**fields):
    """Describes a BlockStored: the reference's block with some fields set otherwise."""
    base = {"block_hashes": [HASH], "token_ids": TOKENS, "block_size": 16}
    return {"type": "BlockStored", **base, **fields}


def removed(**fields):
    """Describes a BlockRemoved: the reference's block with some fields set otherwise."""
    return {"type": "BlockRemoved", "block_hashes": [HASH], **fields}


CLEARED = {"type": "AllBlocksCleared"}
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 4096,
}
CHUNK = {
    "block_hashes": [1, 2, 3],
    "parent_block_hash": HASH,
    "token_ids": list(range(48)),
}
LORA = {"lora_id": 7, "lora_name": "my-lora"}
OFFLOAD = {"token_ids": [], "block_size": 0, "medium": "CPU"}
REMOTE = {"locality": "REMOTE", "ownership": "tier-1"}
EVERY = {**CHUNK, **LORA, "medium": "GPU", "extra_keys": EXTRA, **WINDOW}
EVERY |= {"locality": "LOCAL", "ownership": "tier-1", "session_id": "s-42"}

# name, rank, events. A release whose classes lack a field of a case, or whose own decoder
# refuses the case, has no entry for it.
CASES = [
    ("reference-stored", 0, [stored(medium="GPU", extra_keys=[None], **FULL)]),
    ("reference-stored-short", 0, [stored(medium="GPU")]),
    ("reference-removed", 0, [removed(medium="GPU", group_idx=0)]),
    ("reference-removed-short", 0, [removed(medium="GPU")]),
    ("reference-cleared", 0, [CLEARED]),
    ("stored-minimal", 0, [stored()]),
    ("stored-three-blocks", 0, [stored(**CHUNK)]),
    ("stored-lora", 0, [stored(**CHUNK, **LORA, medium="GPU")]),
    ("stored-lora-id-only", 0, [stored(lora_id=7)]),
    ("stored-extra-keys", 0, [stored(**CHUNK, medium="GPU", extra_keys=EXTRA)]),
    ("stored-no-extra-keys", 0, [stored(medium="GPU", extra_keys=[])]),
    ("stored-sliding-window", 0, [stored(medium="GPU", **WINDOW)]),
    ("stored-no-hashes", 0, [stored(block_hashes=[], medium="GPU", **WINDOW)]),
    ("stored-locality", 0, [stored(medium="CPU", locality="LOCAL")]),
    ("stored-ownership", 0, [stored(medium="STORAGE", **REMOTE)]),
    ("stored-session", 0, [stored(medium="GPU", session_id="s-42")]),
    ("stored-every-field", 0, [stored(**EVERY)]),
    ("stored-offload-placeholder", 0, [stored(**OFFLOAD)]),
    ("stored-offload-group", 0, [stored(**OFFLOAD, group_idx=0)]),
    (
        "stored-hash-widths",
        0,
        [stored(block_hashes=HASHES, parent_block_hash=2**64 - 1)],
    ),
    (
        "stored-negative-hashes",
        0,
        [stored(block_hashes=NEGATIVE, parent_block_hash=-1)],
    ),
    ("stored-token-widths", 0, [stored(token_ids=WIDTHS)]),
    (
        "stored-byte-hashes",
        0,
        [stored(block_hashes=[DIGEST], parent_block_hash=DIGEST)],
    ),
    ("stored-mixed-hashes", 0, [stored(block_hashes=[DIGEST16, HASH])]),
    ("stored-long-strings", 0, [stored(lora_name="é" * 20, medium="x" * 300)]),
    ("removed-minimal", 0, [removed()]),
    ("removed-many", 0, [removed(block_hashes=list(range(17)))]),
    ("removed-byte-hashes", 0, [removed(block_hashes=[DIGEST], medium="CPU")]),
    ("removed-every-field", 0, [removed(medium="STORAGE", group_idx=2, **REMOTE)]),
    ("several-events", 0, [CLEARED, stored(), removed(), stored(**CHUNK), removed()]),
    ("several-events-group", 3, [stored(medium="GPU", **FULL), removed(group_idx=0)]),
    ("rank-nil", None, [stored()]),
    ("rank-3", 3, [stored()]),
    ("no-events", 0, []),
]

T1, T2 = (101, 101), (1717, 101)
SEEDS = {
    "0": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    "vllm-none-hash": ("sha256", "sha256_cbor"),
}
MM = types.SimpleNamespace(offset=3, length=5)
MM2 = types.SimpleNamespace(offset=9, length=40)
LORA_REQUEST = types.SimpleNamespace(lora_name="my-lora", lora_path="/loras/my-lora")


def request(*mm, lora=None, salt=None, embeds=None):
    """Returns as much of a vLLM Request as its extra-key functions read."""
    features = [types.SimpleNamespace(identifier=name, mm_position=place) for name, place in mm]
    return types.SimpleNamespace(
        mm_features=features,
        lora_request=lora,
        cache_salt=salt,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={(0, 16): embeds},
    )


# Extra keys as the reference has them, and as vLLM makes them from a request.
LITERALS = {
    "lora": ("my-lora",),
    "salt": ("salt-1",),
    "lora-mm-salt": ("my-lora", ("abc", 3), "salt-1"),
    "mm": (("abc", -2),),
}
REQUESTS = {
    "request-lora": request(lora=LORA_REQUEST),
    "request-salt": request(salt="salt-1"),
    "request-mm": request(("abc", MM)),
    "request-two-mm": request(("abc", MM), ("def", MM2)),
    "request-embeds": request(embeds=bytes(range(32))),
    "request-lora-mm-salt": request(("abc", MM), lora=LORA_REQUEST, salt="salt-1"),
}


def golden(kv, msgspec):
    """Encodes every case with vLLM's classes; each entry has passed vLLM's decoder."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(type=kv.events.KVEventBatch)
    is_array = kv.events.KVCacheEvent.__struct_config__.array_like
    for name, rank, docs in CASES:
        if rank != 0 and "data_parallel_rank" not in kv.BATCH_FIELDS:
            continue
        if "data_parallel_rank" not in kv.BATCH_FIELDS:
            rank = None
        batch, lacking = kv.batch_from_json(1.5, docs, rank)
        if lacking:
            continue
        payload = encoder.encode(batch)
        try:
            decoded = decoder.decode(payload)
        except msgspec.ValidationError:
            continue
        yield {
            "name": name,
            "version": kv.WHEEL_VERSION,
            "form": "array" if is_array else "map",
            "hex": payload.hex(),
            "batch": kv.batch_to_json(decoded),
        }


class Hasher:
    """Computes hash entries with vLLM's functions, for one algorithm and seed."""

    def __init__(self, kv, algo, seed):
        self.kv = kv
        self.utils, hashing = kv.load_hashing()
        self.function = hashing.get_hash_fn_by_name(algo)
        self.common = {"version": kv.WHEEL_VERSION, "algo": algo, "seed": seed}
        # The seed that is the release's default is checked with the variable unset.
        os.environ["PYTHONHASHSEED"] = seed
        if seed == getattr(self.utils, "DEFAULT_NONE_HASH_SEED", None):
            del os.environ["PYTHONHASHSEED"]
        self.utils.init_none_hash(self.function)

    def entry(self, name, digest, parent=None, tokens=(0, 0), n=0, extra=None):
        """Returns the entry of a digest."""
        return {
            "name": name,
            **self.common,
            "parent_hex": parent and parent.hex(),
            "tokens_first": tokens[0],
            "tokens_step": tokens[1],
            "n": n,
            "extra": self.kv.to_json(extra),
            "digest_hex": digest.hex(),
            "int": self.utils.maybe_convert_block_hash(digest),
        }

    def block(self, name, tokens, parent=None, extra=None, n=16):
        """Returns the entry of a block of n tokens; tokens is (first, step)."""
        first, step = tokens
        ids = [first + i * step for i in range(n)]
        digest = self.utils.hash_block_tokens(self.function, parent, ids, extra)
        return self.entry(name, digest, parent or self.utils.NONE_HASH, tokens, n, extra)

    def entries(self):
        """Yields the root, a chain, short blocks and blocks with extra keys."""
        yield self.entry("none", self.utils.NONE_HASH)
        t1 = self.block("t1", T1)
        yield t1
        yield self.block("t2", T2, bytes.fromhex(t1["digest_hex"]))
        for n in (1, 2, 3, 4):
            yield self.block(f"tokens-{n}", (65535, 1), n=n)
        for name, extra in LITERALS.items():
            yield self.block(name, T1, extra=extra)
        publish = getattr(self.utils, "to_event_extra_keys", lambda keys: keys)
        for name, fake in REQUESTS.items():
            extra, _ = self.utils.generate_block_hash_extra_keys(fake, 0, 16, 0)
            published = self.kv.to_json(publish([extra])[0])
            yield {**self.block(name, T1, extra=extra), "published": published}


def hashes(kv):
    """Yields the hash entries of every algorithm and seed."""
    for seed, algos in SEEDS.items():
        for algo in algos:
            yield from Hasher(kv, algo, seed).entries()


def emit():
    """Prints this venv's entries; runs inside a venv."""
    import msgspec

    import kvevents as kv

    docs = {"golden": list(golden(kv, msgspec))}
    if Path(sys.prefix).name in HASHED:
        docs["hashes"] = list(hashes(kv))
    print(json.dumps(docs))


def gather(venvs) -> dict:
    """Returns the entries that each venv's own code yields, in the order of the files."""
    files = {"golden": [], "hashes": []}
    for venv in venvs:
        command = [HERE / ".venv" / venv / "bin" / "python", __file__, "--emit"]
        docs = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for name, entries in docs.items():
            files[name] += entries
    return files


def check(files: dict) -> int:
    """Compares with the files' entries of the same releases; returns an exit status."""
    for name, entries in files.items():
        path = OUT / f"{name}.json"
        versions = {entry["version"] for entry in entries}
        there = [entry for entry in json.loads(path.read_text()) if entry["version"] in versions]
        if there != entries:
            print(f"{path.name} differs from what vLLM's code yields", file=sys.stderr)
            return 1
        print(f"{path.name}: {len(entries)} entries of {', '.join(sorted(versions))} are right")
    return 0


def write(files: dict) -> int:
    """Writes the files; returns an exit status."""
    for name, entries in files.items():
        lines = (json.dumps(entry, ensure_ascii=False) for entry in entries)
        (OUT / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
        print(f"{name}.json: {len(entries)} entries")
    return 0


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", metavar="NAME", choices=VENVS, help="compare")
    parser.add_argument("--emit", action="store_true", help="print this venv's entries")
    args = parser.parse_args()
    if args.emit:
        emit()
        return 0
    if args.check is None:
        return write(gather(VENVS))
    return check(gather([venv for venv in VENVS if not args.check or venv in args.check]))


if __name__ == "__main__":
    sys.exit(main())
