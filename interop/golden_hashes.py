"""Writes ../event/enginehash/testdata/{vllm,sglang}_hashes.json with vLLM's and SGLang's own code.

Run by any Python; it runs itself in each venv of `setup.sh all sglang-hash sglang`. With --check it
compares with the files that are there and exits 1 when they differ; --check NAME… compares only
the entries of those venvs.
"""

import argparse
import json
import os
import subprocess
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "event" / "enginehash" / "testdata"
VLLM = ("older", "old", "mid", "new")
SGLANG = ("sglang-hash", "sglang")

ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
ROOT = bytes(range(100, 132))  # as os.urandom gave it
T1 = list(range(101, 1617, 101))
T2 = list(range(1717, 3233, 101))
BORDERS = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]


def fresh(text: str) -> str:
    """Returns a text that is an object of its own, as one that was decoded from a request is."""
    return text.encode().decode()


def item(identifier: str, offset: int, length: int = 40):
    """Describes a multimodal item."""
    place = types.SimpleNamespace(offset=offset, length=length)
    return types.SimpleNamespace(identifier=identifier, mm_position=place)


def request(*items, lora=None, salt=None, embeds=None):
    """Returns as much of a vLLM Request as its extra-key functions read."""
    adapter = lora and types.SimpleNamespace(lora_name=lora, lora_path=fresh("/loras/" + lora))
    return types.SimpleNamespace(
        mm_features=list(items),
        lora_request=adapter,
        cache_salt=salt,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={(0, 16): embeds, (16, 32): embeds},
    )


def requests():
    """Yields (name, start of the block, whether equal identifiers are one object, request)."""
    lora, salt = fresh("my-lora"), fresh("salt-1")
    one, other = fresh("image-1"), fresh("image-1")
    yield "lora", 0, False, request(lora=lora)
    yield "lora-later", 16, False, request(lora=lora, salt=salt)
    yield "lora-one-letter", 0, False, request(lora=fresh("é"), salt=fresh("é"))
    yield "salt", 0, False, request(salt=salt)
    yield "salt-later", 16, False, request(salt=salt)
    yield "salt-long", 0, False, request(salt="é" * 200)
    yield "lora-is-salt", 0, False, request(lora=lora, salt=fresh("my-lora"))
    yield "embeds", 0, False, request(embeds=bytes(range(32)))
    yield "embeds-salt", 0, False, request(salt=salt, embeds=bytes(range(32)))
    yield "item", 0, False, request(item(one, 3))
    yield "item-began-before", 16, False, request(item(one, 3))
    yield "item-far-before", 70016, False, request(item(one, 0, 80000))
    yield "items", 0, False, request(item(one, 3, 5), item(fresh("image-2"), 9))
    yield "items-equal", 0, False, request(item(one, 3, 5), item(other, 9))
    yield "items-same", 0, True, request(item(one, 3, 5), item(one, 9))
    yield "items-one-letter", 0, False, request(item(fresh("a"), 3, 5), item(fresh("a"), 9))
    yield "items-without-name", 0, False, request(item("", 3, 5), item(fresh(""), 9))
    yield "items-called-mm", 0, False, request(item(fresh("mm"), 3, 5), item(fresh("mm"), 9))
    yield "five-items", 0, False, request(*(item(fresh(f"image-{i}"), 3 * i, 3) for i in range(5)))
    yield "many-items", 0, False, request(*(item(fresh(f"image-{i}"), i, 1) for i in range(16)))
    every = request(item(one, 3, 5), lora=lora, salt=salt, embeds=bytes(range(32)))
    yield "every-kind", 0, False, every


def typed(extra, lora, salt) -> list:
    """Describes extra keys as event/enginehash has them."""
    keys = []
    for key in extra or ():
        tagged = isinstance(key, tuple) and not isinstance(key[1], int)
        kind, *rest = key if tagged else (None, key)
        if isinstance(rest[0], bytes):
            keys.append({"kind": "embeds", "hex": rest[0].hex()})
        elif kind == "lora":
            keys.append({"kind": "lora", "text": rest[0], "path": rest[1]})
        elif kind == "mm":
            keys.append({"kind": "item", "text": rest[0], "offset": rest[1]})
        elif kind == "cache_salt":
            keys.append({"kind": "salt", "text": rest[0]})
        elif isinstance(rest[0], tuple):
            keys.append({"kind": "item", "text": rest[0][0], "offset": rest[0][1]})
        elif lora and not keys and rest[0] is lora:
            keys.append({"kind": "lora", "text": rest[0]})
        elif rest[0] is salt:
            keys.append({"kind": "salt", "text": rest[0]})
        else:
            keys.append({"kind": "identifier", "text": rest[0]})
    return keys


class Hasher:
    """Computes entries with vLLM's functions, for one algorithm and seed."""

    def __init__(self, kv, algo, seed):
        self.utils, hashing = kv.load_hashing()
        self.function = hashing.get_hash_fn_by_name(algo)
        self.common = {"version": kv.WHEEL_VERSION, "algo": algo, "seed": seed}
        default = getattr(self.utils, "DEFAULT_NONE_HASH_SEED", None)
        os.environ["PYTHONHASHSEED"] = seed
        if seed == default and algo.startswith("sha256"):
            del os.environ["PYTHONHASHSEED"]  # that it is the default is checked, too
        self.utils.init_none_hash(self.function)
        if seed.startswith("root:"):
            self.utils.NONE_HASH = bytes.fromhex(seed.removeprefix("root:"))

    def entry(self, name, digest, parent=None, tokens=(), **rest):
        """Returns the entry of a digest."""
        number = self.utils.maybe_convert_block_hash(digest)
        parent = parent and parent.hex()
        common = {"name": name, **self.common, "parent": parent, "tokens": list(tokens)}
        return {**common, **rest, "digest": digest.hex(), "int": number}

    def block(self, name, tokens, parent=None, extra=None, **rest):
        """Returns a block's digest and its entry."""
        digest = self.utils.hash_block_tokens(self.function, parent, tokens, extra)
        return digest, self.entry(name, digest, parent or self.utils.NONE_HASH, tokens, **rest)

    def roots(self):
        """Yields the root and a chain."""
        yield self.entry("root", self.utils.NONE_HASH)
        first, entry = self.block("t1", T1)
        yield entry
        yield self.block("t2", T2, first)[1]

    def blocks(self):
        """Yields blocks of every width and length."""
        for n in (1, 2, 3, 4, 16, 300):
            yield self.block(f"tokens-{n}", list(range(65530, 65530 + n)))[1]
        yield self.block("borders", BORDERS)[1]

    def extras(self, encode):
        """Yields blocks with extra keys, as vLLM makes them of a request."""
        publish = getattr(self.utils, "to_event_extra_keys", lambda keys: keys)
        parent = bytes(reversed(range(len(self.utils.NONE_HASH))))
        for name, start, same, fake in requests():
            if fake.prompt_embeds and self.common["version"] == "0.11.2":
                continue  # it hashes the embeddings themselves
            features = fake.mm_features
            extra, _ = self.utils.generate_block_hash_extra_keys(fake, start, start + 16, 0)
            tagged = bool(extra) and hasattr(self.utils, "to_event_extra_keys")
            lora = fake.lora_request and fake.lora_request.lora_name
            yield self.block(
                name,
                T1,
                parent if start else None,
                extra,
                lora=lora,
                is_root=start == 0,
                form="tagged" if tagged else "plain",
                same=same and len(features) > 1,
                keys=typed(extra, lora, fake.cache_salt),
                event=encode(publish([extra])[0]).hex(),
            )[1]


def vllm_entries():
    """Yields the entries of this venv's vLLM."""
    import msgspec

    import kvevents as kv

    utils, hashing = kv.load_hashing()
    default = getattr(utils, "DEFAULT_NONE_HASH_SEED", "vllm-none-hash")
    for algo in ALGOS:
        try:
            hashing.get_hash_fn_by_name(algo)
        except ValueError:
            continue  # xxhash came later than 0.11
        for seed in ("0", "random", default, "x" * 300, f"root:{ROOT.hex()}"):
            yield from Hasher(kv, algo, seed).roots()
        yield from Hasher(kv, algo, "0").blocks()
        yield from Hasher(kv, algo, "0").extras(msgspec.msgpack.encode)


def sglang_entries():
    """Yields the entries of this venv's SGLang: pages of one prompt, chained."""
    import sglcode as sgl

    prompt = list(range(1, 49))
    for name, size, tokens, salt in (
        ("pages-16", 16, prompt, None),
        ("pairs", 16, [*prompt, 49], None),
        ("pages-1", 1, [0, 1, 2], None),
        ("borders", len(BORDERS), BORDERS, None),
        ("salt", 16, prompt, "salt-1"),
        ("salt-long", 16, prompt, "é" * 200),
    ):
        pairs = name == "pairs"
        units = list(zip(tokens, tokens[1:])) if pairs else tokens
        digests = sgl.digests(units, size, salt)
        if digests is None:
            continue  # this release has no salt, or its pairs are hashed in C++
        yield {
            "name": name,
            "version": sgl.WHEEL_VERSION,
            "block_size": size,
            "tokens": tokens,
            "salt": salt,
            "pairs": pairs,
            "digests": digests,
            "ints": [sgl.utils.hash_str_to_int64(digest) for digest in digests],
        }


def gather(venvs) -> list:
    """Returns the entries that each venv's own code yields, in order."""
    entries = []
    for venv in venvs:
        command = [HERE / ".venv" / venv / "bin" / "python", __file__, "--emit"]
        entries += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return entries


def merged(entries) -> list:
    """Joins entries that differ in the release alone."""
    joined = {}
    for entry in entries:
        rest = {k: v for k, v in entry.items() if k != "version"}
        joined.setdefault(json.dumps(rest), []).append(entry["version"])
    return [{**json.loads(text), "versions": versions} for text, versions in joined.items()]


def expanded(entries) -> list:
    """Reverses merged, but for the order."""
    return [
        {k: v for k, v in entry.items() if k != "versions"} | {"version": version}
        for entry in entries
        for version in entry["versions"]
    ]


def texts(entries) -> list:
    """Returns entries in an order of their own."""
    return sorted(json.dumps(entry, sort_keys=True) for entry in entries)


def check(name, entries) -> bool:
    """Compares with the file's entries of the same releases."""
    versions = {entry["version"] for entry in entries}
    there = expanded(json.loads((OUT / name).read_text()))
    if texts(e for e in there if e["version"] in versions) != texts(entries):
        print(f"{name} differs from what the engines' code yields", file=sys.stderr)
        return False
    if entries:
        print(f"{name}: {len(entries)} entries of {', '.join(sorted(versions))} are right")
    return True


def write(name, entries) -> bool:
    """Writes a file."""
    OUT.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(entry, ensure_ascii=False) for entry in merged(entries)]
    (OUT / name).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{name}: {len(lines)} entries")
    return True


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", metavar="NAME", choices=VLLM + SGLANG, help="compare")
    parser.add_argument("--emit", action="store_true", help="print this venv's entries")
    args = parser.parse_args()
    if args.emit:
        is_sglang = Path(sys.prefix).name in SGLANG
        print(json.dumps(list(sglang_entries() if is_sglang else vllm_entries())))
        return 0
    wanted = args.check or VLLM + SGLANG
    act = write if args.check is None else check
    files = {"vllm_hashes.json": VLLM, "sglang_hashes.json": SGLANG}
    done = [
        act(name, gather(venv for venv in venvs if venv in wanted)) for name, venvs in files.items()
    ]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
