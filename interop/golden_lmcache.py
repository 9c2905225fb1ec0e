"""Writes what LMCache's own code yields to ../connector/lmcache/testdata/golden.json.

Frames, metadata, keys, element types and formats, and the chunk hashes of every algorithm.
--check compares with the file instead.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE.parent / "connector" / "lmcache" / "testdata" / "golden.json"

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
HASHES = [0, 1, 0xABC, 2**63 - 1, 2**64 - 1, -1, -(2**63), bytes(range(240, 256)) * 2]
SHAPES = [[2, 32, 256, 1024], [1, 61, 64, 576], [256, 1024], [7], [2147483647, 0, 0, 0]]
LENGTHS = [0, 1, 33554432, 2147483647]
# The algorithm, PYTHONHASHSEED (null: not set), and whether vLLM can be imported.
HASHINGS = [
    ("builtin", "0", True),
    ("builtin", "42", True),
    ("builtin", "4294967295", True),
    ("builtin", "0", False),
    ("sha256_cbor", "0", True),
    ("sha256_cbor", None, True),
    ("sha256_cbor_64bit", "7", True),
    ("sha256", "0", True),
    ("sha256", None, True),
    ("xxhash", "123", True),
    ("xxhash_cbor", "123", True),
]
# First token and step of 600 tokens; and the tokens of a chunk.
PROMPTS = [(101, 101), (0, 1), (4294967295, -7919), (23, 0), (2147483640, 1)]
CHUNKS = [1, 3, 4, 16, 256]


def keys(lm):
    """Yields keys of every element type and hash, with and without layer and tags."""
    torch = lm.torch
    for element in lm.utils.TORCH_DTYPE_TO_STR_DTYPE:
        if element in lm.protocol.DTYPE_TO_INT:
            yield lm.utils.CacheEngineKey(MODEL, 8, 7, 0xFEED, element), {}
    for chunk_hash in HASHES:
        yield lm.utils.CacheEngineKey("m", 1, 0, chunk_hash, torch.half), {}
    tags = {"lmcache.tag.user": "a%b", "lmcache.tag.x": "1", "other": "no"}
    key = lm.utils.CacheEngineKey("m", 2, 1, 5, torch.bfloat16, tags)
    yield key, {}
    yield key.split_layers(3)[2], {"layer": 2}


def key_entries(lm):
    """Yields each key's parts and text."""
    for key, more in keys(lm):
        chunk_hash = key.chunk_hash
        yield {
            "model": key.model_name,
            "world": key.world_size,
            "worker": key.worker_id,
            "hash": chunk_hash.hex() if isinstance(chunk_hash, bytes) else str(chunk_hash),
            "dtype": lm.protocol.DTYPE_TO_INT[key.dtype],
            "tags": [list(tag) for tag in key.tags or ()],
            **more,
            "text": key.to_string(),
        }


def contents(lm):
    """Yields (length, format, element type, shape, location) of every number there is."""
    formats, elements = list(lm.memory.MemoryFormat), list(lm.protocol.DTYPE_TO_INT)
    locations = list(lm.protocol.LOCATION_TO_INT)
    for i in range(24):
        shape = lm.torch.Size(SHAPES[i % len(SHAPES)])
        yield (
            LENGTHS[i % len(LENGTHS)],
            formats[i % len(formats)],
            elements[i % len(elements)],
            shape,
            locations[i % len(locations)],
        )


def number(lm, length, fmt, element, shape, location) -> dict:
    """Returns the numbers that stand on the wire."""
    return {
        "length": length,
        "format": fmt.value,
        "dtype": lm.protocol.DTYPE_TO_INT[element],
        "shape": lm.protocol.pad_shape_to_4d(shape),
        "location": lm.protocol.LOCATION_TO_INT[location],
    }


def frames(lm):
    """Returns requests, replies and metadata, each of which LMCache's parser reads back."""
    p, out = lm.protocol, {"requests": [], "replies": [], "metadata": []}
    key = lm.utils.CacheEngineKey(MODEL, 8, 7, 0xFEED, lm.torch.bfloat16)
    for i, parts in enumerate(contents(lm)):
        length, fmt, element, shape, location = parts
        command = p.ClientCommand(1 + i % 5)
        request = p.ClientMetaMessage(command, key, length, fmt, element, shape, location)
        packed = request.serialize()
        assert len(packed) == p.ClientMetaMessage.packlength()
        assert p.ClientMetaMessage.deserialize(packed).serialize() == packed
        doc = {"command": command.value, "key": key.to_string(), **number(lm, *parts)}
        out["requests"].append({**doc, "hex": packed.hex()})
        code = p.ServerReturnCode.FAIL if i % 3 == 0 else p.ServerReturnCode.SUCCESS
        packed = p.ServerMetaMessage(code, length, fmt, element, shape, location).serialize()
        assert len(packed) == p.ServerMetaMessage.packlength()
        assert p.ServerMetaMessage.deserialize(packed).serialize() == packed
        out["replies"].append({"code": code.value, **number(lm, *parts), "hex": packed.hex()})
        groups = 1 + i % 3
        p.init_remote_metadata_info(groups)
        packed = p.RemoteMetadata(length, [shape] * groups, [element] * groups, fmt).serialize()
        assert p.RemoteMetadata.deserialize(packed).serialize() == packed
        doc = {"groups": groups, **number(lm, *parts)}
        out["metadata"].append({**doc, "hex": packed.hex()})
    return out


def hashings():
    """Yields the chunk hashes that this process's PYTHONHASHSEED and the flags lead to."""
    algorithm, bare = os.environ["ALGORITHM"], "BARE" in os.environ
    import kvevents
    import lmcode

    kvevents.load_hashing()
    # vLLM's hash functions have left this module for another; the stub would have them still.
    module = sys.modules["vllm.utils"]
    module.__class__ = types.ModuleType
    del module.__path__
    if bare:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            sys.modules[name] = None  # importing it is an error
    tokens = importlib.import_module("lmcache.v1.token_database")
    for chunk in CHUNKS:
        config = types.SimpleNamespace(
            pre_caching_hash_algorithm=algorithm,
            chunk_size=chunk,
            remote_url=None,
            enable_pd=False,
            save_unfull_chunk=False,
            get_extra_config_value=lambda name, default: default,
        )
        metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
            "m", 1, 1, 0, 0, lmcode.torch.half, (1, 2, chunk, 1, 1)
        )
        database = tokens.ChunkedTokenDatabase(config, metadata)
        for first, step in PROMPTS:
            ids = [(first + i * step) % 2**32 for i in range(600)]
            found = [key for _, _, key in database.process_tokens(tokens=ids)]
            some = found if chunk >= 16 else found[:3] + found[-1:]
            yield {
                "algorithm": algorithm,
                "seed": os.environ.get("PYTHONHASHSEED"),
                "bare": bare,
                "chunk": chunk,
                "first": first,
                "step": step,
                "number": len(found),
                "hashes": [key.chunk_hash_hex for key in some],
            }


def emit():
    """Prints what this venv's LMCache yields; runs inside it."""
    if "ALGORITHM" in os.environ:
        print(json.dumps(list(hashings())))
        return
    import lmcode as lm

    doc = {
        "version": lm.WHEEL_VERSION,
        "dtypes": {str(e).removeprefix("torch."): n for e, n in lm.protocol.DTYPE_TO_INT.items()},
        "formats": {fmt.name: fmt.value for fmt in lm.memory.MemoryFormat},
        "max_key": lm.protocol.MAX_KEY_LENGTH,
        "keys": list(key_entries(lm)),
        **frames(lm),
        "hashings": [],
    }
    print(json.dumps(doc))


def child(env: dict) -> dict:
    """Runs this script inside the venv."""
    command = [HERE / ".venv" / "lmcache" / "bin" / "python", __file__, "--emit"]
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, env=inherited | env).stdout
    )


def gather() -> dict:
    """Returns the whole document. PYTHONHASHSEED takes effect at a process's start."""
    doc = child({})
    for algorithm, seed, with_vllm in HASHINGS:
        env = {"ALGORITHM": algorithm}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        if not with_vllm:
            env["BARE"] = "1"
        doc["hashings"] += child(env)
    return doc


def text(doc: dict) -> str:
    """Writes an entry a line."""
    parts = []
    for name, value in doc.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(entry) for entry in value)
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare")
    parser.add_argument("--emit", action="store_true", help="print this process's part")
    args = parser.parse_args()
    if args.emit:
        emit()
        return 0
    doc = gather()
    if not args.check:
        OUT.write_text(text(doc))
        print(f"{OUT.name}: {sum(len(v) for v in doc.values() if isinstance(v, list))} entries")
        return 0
    if OUT.read_text() != text(doc):
        print(f"{OUT.name} differs from what LMCache's code yields", file=sys.stderr)
        return 1
    print(f"lmcache/{OUT.name}: everything of LMCache {doc['version']} is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
