"""Serves LMCache's own code, as the wheel of the running venv has it, without torch.

setup.sh unpacks only the files under test. A finder serves those unchanged and gives every
other `lmcache.*` module, torch and transformers as empty stubs; of torch there is what the
frames and keys need: element types and sizes. vLLM's hash functions, which LMCache takes for
its chunk hashes, are the real ones of the release that setup.sh calls new (kvevents.py).
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import logging
import math
import sys
import sysconfig
import types
from pathlib import Path

import kvevents  # noqa: F401  # serves vllm.*

WHEEL_VERSION = importlib.metadata.version("lmcache")
SITE = Path(sysconfig.get_path("purelib"))


class dtype:
    """An element type of torch: compares by identity, as torch's do."""

    def __init__(self, name: str, itemsize: int):
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Size(tuple):
    """A shape of torch."""

    def numel(self) -> int:
        return math.prod(self)


class Tensor:
    """Nothing that runs here makes one."""


DTYPES = {
    name: dtype(name, itemsize)
    for name, itemsize in {
        "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1, "int8": 1,
        "int16": 2, "int32": 4, "int64": 8, "bool": 1, "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    }.items()
}  # fmt: skip
ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


class _Stub(types.ModuleType):
    """A module that is not under test: any name in it is a plain record class."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "lmcache.integration.vllm.utils":
            return getattr(importlib.import_module("lmcache.utils"), name)
        # GetOrCreate is how LMCache gets its monitors, at import; annotations subscript classes.
        methods = {
            "GetOrCreate": classmethod(lambda cls: cls()),
            "__class_getitem__": classmethod(lambda cls, _: cls),
        }
        return type(name, (types.SimpleNamespace,), methods)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the wheel's files where they were unpacked and stubs everything else."""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ("lmcache", "torch", "transformers"):
            return None
        base = SITE / name.replace(".", "/")
        if top == "lmcache":
            if (base / "__init__.py").exists():
                file = base / "__init__.py"
                return importlib.util.spec_from_file_location(
                    name, file, submodule_search_locations=[str(base)]
                )
            if base.with_suffix(".py").exists():
                return importlib.util.spec_from_file_location(name, base.with_suffix(".py"))
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == "lmcache.logging":
            module.init_logger = logging.getLogger
        if module.__name__ == "torch":
            names = DTYPES | {alias: DTYPES[name] for alias, name in ALIASES.items()}
            module.__dict__.update(names, dtype=dtype, Size=Size, Tensor=Tensor)


sys.meta_path.insert(0, _Finder())
torch = importlib.import_module("torch")
