"""SGLang's own block hashes, as the wheel of the running venv has them, without torch.

setup.sh unpacks only the files under test. A finder serves those unchanged and gives every other
`sglang.*` module as an empty stub. Since 0.5.14 or so the page hash itself is C++, which is built
at run time for torch; what stands in for it in newer releases is the Python that it replaced, so
that of those only salted roots and integers are theirs.
"""

import hashlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
import sysconfig
import types
from pathlib import Path

WHEEL_VERSION = importlib.metadata.version("sglang")
SITE = Path(sysconfig.get_path("purelib"))


def page_hash(tokens, prior, size):
    """Stands in for sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash."""
    digests = []
    for start in range(0, len(tokens), size):
        page = b"".join(t.to_bytes(4, "little") for t in tokens.token_ids[start : start + size])
        prior = hashlib.sha256((prior or b"") + page).digest()
        digests.append(prior.hex())
    return digests


class _Stub(types.ModuleType):
    """A module of SGLang that is not under test: any name in it is a plain record class."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_native_hash":
            return page_hash
        return type(name, (types.SimpleNamespace,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the wheel's files where they were unpacked and stubs everything else of SGLang."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "sglang":
            return None
        file = SITE / (name.replace(".", "/") + ".py")
        if file.exists() and not name.endswith(".native_hash"):  # which would be built when it is called
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
utils = importlib.import_module("sglang.srt.mem_cache.utils")


class Key:
    """As much of a RadixKey as the hash functions read."""

    is_bigram = False
    extra_key = None

    def __init__(self, token_ids, salt):
        self.token_ids, self.cache_salt = token_ids, salt

    def __len__(self):
        return len(self.token_ids)

    def hash_page(self, start, end, prior):
        """Hashes one page, where nodes leave that to their keys."""
        return utils.get_hash_str(self.token_ids[start:end], prior)


def digests(tokens, size, salt):
    """Returns the digests of a root node's pages in hexadecimal.

    None where a release has no salts, or hashes pairs of tokens in C++ alone.
    """
    is_stand_in = hasattr(utils, "get_native_hash")
    if is_stand_in and isinstance(tokens[0], tuple):
        return None
    node = types.SimpleNamespace(
        key=Key(tokens, salt), parent=None, hash_value=None, event_hash_value=None
    )
    if salt is None:
        return utils.compute_node_hash_values(node, size)
    if not hasattr(utils, "compute_node_event_hash_values"):
        return None
    return utils.compute_node_event_hash_values(node, size)
