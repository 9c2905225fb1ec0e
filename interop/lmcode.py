"""LMCache's own frames, keys and remote connectors, and what stands in for the memory of its engine."""

import asyncio
import hashlib
import importlib
import types

from lmstubs import WHEEL_VERSION, Size, torch  # noqa: F401

utils = importlib.import_module("lmcache.utils")
memory = importlib.import_module("lmcache.v1.memory_management")
protocol = importlib.import_module("lmcache.v1.protocol")


def content(seed: str, size: int) -> bytes:
    """Returns made-up bytes that the Go side makes as well."""
    return hashlib.shake_128(seed.encode()).digest(size)


class Chunk:
    """As much of LMCache's MemoryObj as its connectors use, over bytes of the host."""

    def __init__(self, shape, element, fmt, data: bytearray):
        self.shape, self.element, self.fmt = Size(shape), element, fmt
        self.byte_array = memoryview(data)

    def get_shape(self):
        return self.shape

    def get_dtype(self):
        return self.element

    def get_shapes(self):
        return [self.shape]

    def get_dtypes(self):
        return [self.element]

    def get_memory_format(self):
        return self.fmt


class Backend:
    """As much of LMCache's LocalCPUBackend as its connectors use."""

    def __init__(self, config, metadata):
        self.config, self.metadata = config, metadata

    def allocate(self, shapes, dtypes, fmt):
        """Returns room for one chunk; the Redis connector gives lists of one."""
        shape = shapes[0] if isinstance(shapes, list) else shapes
        element = dtypes[0] if isinstance(dtypes, list) else dtypes
        return Chunk(shape, element, fmt, bytearray(shape.numel() * element.itemsize))


class Client:
    """LMCache's connector for a URL, for chunks of one model, on a loop of its own thread."""

    def __init__(self, url: str, loop, model, world, worker, element, shape, mla=False):
        """shape is [2 or 1, layers, tokens, hidden]."""
        metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
            model_name=model,
            world_size=world,
            local_world_size=world,
            worker_id=worker,
            local_worker_id=worker,
            kv_dtype=getattr(torch, element),
            kv_shape=(shape[1], shape[0], shape[2], 1, shape[3]),
            use_mla=mla,
            chunk_size=shape[2],
        )
        config = types.SimpleNamespace(extra_config=None, use_layerwise=False)
        self.metadata, self.backend = metadata, Backend(config, metadata)
        self.fmt = memory.MemoryFormat.KV_MLA_FMT if mla else memory.MemoryFormat.KV_2LTD
        self.shape, self.loop = Size(shape), loop
        package = "lmcache.v1.storage_backend.connector."
        if url.startswith("lm://"):
            host, port = url.removeprefix("lm://").split(":")
            cls = importlib.import_module(package + "lm_connector").LMCServerConnector
            self.connector = cls(host, int(port), loop, self.backend)
        else:
            cls = importlib.import_module(package + "redis_connector").RedisConnector
            self.connector = cls(url, loop, self.backend)

    def key(self, chunk_hash: int):
        """Returns LMCache's key of a chunk."""
        m = self.metadata
        return utils.CacheEngineKey(m.model_name, m.world_size, m.worker_id, chunk_hash, m.kv_dtype)

    def chunk(self, data: bytes) -> Chunk:
        """Returns the chunk with these bytes."""
        return Chunk(self.shape, self.metadata.kv_dtype, self.fmt, bytearray(data))

    def bytes(self) -> int:
        """Returns the bytes of a chunk."""
        return self.shape.numel() * self.metadata.kv_dtype.itemsize

    async def put(self, chunk_hash: int, chunk: Chunk):
        await self.connector.put(self.key(chunk_hash), chunk)

    async def get(self, chunk_hash: int):
        return await self.connector.get(self.key(chunk_hash))

    async def exists(self, chunk_hash: int) -> bool:
        return await self.connector.exists(self.key(chunk_hash))


def run(main):
    """Runs a coroutine function on a loop that it gets as its argument."""
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(main(loop))
