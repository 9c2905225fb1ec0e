"""SGLang's own event code and radix cache, as the wheel of the running venv has them, without torch.

setup.sh unpacks only the files under test. A finder serves those unchanged and gives every other
`sglang.*` module, and torch, as stubs: of torch there is what the radix cache needs, a tensor that
is a list. SGLang computes page hashes in C++, compiled at start-up; hash_pages does the same here.
"""

import hashlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import logging
import struct
import sys
import sysconfig
import types
from array import array
from pathlib import Path

WHEEL_VERSION = importlib.metadata.version("sglang")
SITE = Path(sysconfig.get_path("purelib"))


class Tensor(list):
    """As much of torch's tensor as the radix cache uses."""

    def clone(self):
        return Tensor(self)

    def __getitem__(self, at):
        return Tensor(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)


class device:
    """A device of torch."""

    def __init__(self, name):
        self.name = name


def hash_pages(tokens, prior: bytes | None, page_size: int | None):
    """Stands in for SGLang's C++: each page's SHA-256 over the one before it and its tokens.

    Tokens are 32-bit little-endian words; bigrams are two words each.
    """
    raw = list(tokens.raw_token_ids() if hasattr(tokens, "raw_token_ids") else tokens)
    if getattr(tokens, "is_bigram", False):
        units = [(raw[i], raw[i + 1]) for i in range(len(tokens))]
    else:
        units = [(token,) for token in raw[: len(tokens)]]
    digests = []
    for start in range(0, len(units), page_size or len(units) or 1):
        words = [word for unit in units[start : start + (page_size or len(units))] for word in unit]
        prior = hashlib.sha256((prior or b"") + struct.pack(f"<{len(words)}I", *words)).digest()
        digests.append(prior.hex())
    return digests if page_size else digests[0]


class _Stub(types.ModuleType):
    """A module that is not under test: any name in it is a plain record class."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if (SITE / self.__name__.replace(".", "/") / f"{name}.py").exists():
            return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (types.SimpleNamespace,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the wheel's files where they were unpacked and stubs everything else."""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ("sglang", "torch"):
            return None
        file = SITE / (name.replace(".", "/") + ".py")
        if top == "sglang" and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == "torch":
            module.__dict__.update(
                Tensor=Tensor,
                device=device,
                int64="int64",
                empty=lambda *_, **__: Tensor(),
                tensor=lambda values, **_: Tensor(values),
                cat=lambda tensors: Tensor(item for tensor in tensors for item in tensor),
            )


sys.meta_path.insert(0, _Finder())
logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
events = importlib.import_module("sglang.srt.disaggregation.kv_events")

CLASSES = {
    cls.__name__: cls for cls in (events.BlockStored, events.BlockRemoved, events.AllBlocksCleared)
}
# 0.5.18 and 0.5.19 put the salt into a second class of stored event, in a last element of its own.
WITH_METADATA = getattr(events, "BlockStoredWithMetadata", None)
# 0.5.3 has the recorder within its radix cache, and hashes blocks with Python's hash.
HAS_RECORDER = (SITE / "sglang" / "srt" / "mem_cache" / "events.py").exists()
_NULLABLE = ("parent_block_hash", "lora_id")


def build(doc: dict):
    """Builds SGLang's event from {"type": …, field: …}; None when this version lacks a field."""
    cls = CLASSES[doc["type"]]
    fields = {k: v for k, v in doc.items() if k != "type"}
    if WITH_METADATA and "cache_salt" in fields:
        cls = WITH_METADATA
        fields["metadata"] = events.BlockStoredMetadata(cache_salt=fields.pop("cache_salt"))
    for name in _NULLABLE:
        if name in cls.__struct_fields__:
            fields.setdefault(name, None)
    return cls(**fields) if fields.keys() <= set(cls.__struct_fields__) else None


def describe(event) -> dict:
    """Describes an event with every field that its class has; SGLang's tag as its type."""
    doc = {"type": event.__struct_config__.tag}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name == "metadata":
            doc["cache_salt"] = value.cache_salt
        elif name == "token_ids":
            doc[name] = [list(item) if isinstance(item, tuple) else item for item in value]
        else:
            doc[name] = value
    return doc


class Radix:
    """SGLang's radix cache with its event recorder, over no memory."""

    def __init__(self, page_size=4, eagle=False, dynamo=False, adapters=()):
        """adapters are (identifier, name)."""
        self.cache = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self.base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        params = importlib.import_module("sglang.srt.mem_cache.cache_init_params").CacheInitParams
        importlib.import_module("sglang.srt.mem_cache.utils").get_native_hash = hash_pages
        self.known = set(inspect.signature(params).parameters)
        more = {}
        if dynamo:
            more["dynamo_kv_event_format"] = True
        pool = types.SimpleNamespace(
            device="cpu", free=lambda *_, **__: None, free_segment=lambda *_, **__: None
        )
        built = params(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=pool,
            page_size=page_size,
            is_eagle=eagle,
            enable_kv_cache_events=True,
            **more,
        )
        if adapters:
            names = importlib.import_module("sglang.srt.mem_cache.events")
            table = getattr(names, "KvEventLoraNames", None) or names.LoRANameTable
            built.kv_event_lora_names = table()
            for identifier, name in adapters:
                request = types.SimpleNamespace(extra_key=identifier, lora_id=identifier)
                if hasattr(names, "KvEventLoraNames"):
                    built.kv_event_lora_names.register(request, name)
                else:
                    built.kv_event_lora_names.register(lora_id=identifier, lora_name=name)
        self.tree = self.cache.RadixCache(built)

    def key(self, tokens, extra=None, salt=None):
        """Returns the tree's key of some tokens."""
        more = {"cache_salt": salt} if salt else {}
        return self.cache.RadixKey(array("q", tokens), extra, **more)

    def insert(self, tokens, extra=None, salt=None):
        self.tree.insert(self.base.InsertParams(key=self.key(tokens, extra, salt)))

    def evict(self, tokens: int):
        self.tree.evict(self.base.EvictParams(num_tokens=tokens))

    def reset(self):
        self.tree.reset()

    def leaf(self):
        """Returns the node that was inserted first and never split."""
        return next(iter(self.tree.root_node.children.values()))

    def record(self, medium, removed=False):
        """Records the leaf's copy in a lower tier, or its removal, as SGLang's host cache does."""
        medium = events.StorageMedium(medium)
        recorder = getattr(self.tree, "kv_events", self.tree)
        prefix = "" if hasattr(recorder, "record_store") else "_"
        suffix = "" if hasattr(recorder, "record_store") else "_event"
        name = f"{prefix}record_{'remove' if removed else 'store'}{suffix}"
        getattr(recorder, name)(self.leaf(), medium=medium)

    def take(self) -> list:
        return list(self.tree.take_events())
