"""Copies the files under test of a wheel into the running venv, unchanged."""

import base64
import hashlib
import os
import sys
import sysconfig
import zipfile

# A name that ends in a slash or a dot stands for all that begin with it.
FILES = (
    "dynamo/_core.",
    "vllm/distributed/kv_events.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py",
    "vllm/distributed/kv_transfer/kv_connector/v1/offloading/events.py",
    "vllm/envs.py",
    "vllm/utils/hashing.py",
    "vllm/utils/math_utils.py",
    "vllm/utils/network_utils.py",
    "vllm/v1/core/block_pool.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/kv_offload/base.py",
    "lmcache/integration/vllm/lmcache_mp_connector.py",
    "lmcache/integration/vllm/vllm_multi_process_adapter.py",
    "lmcache/protocol.py",
    "lmcache/server/__main__.py",
    "lmcache/server/server_storage_backend/__init__.py",
    "lmcache/server/server_storage_backend/abstract_backend.py",
    "lmcache/server/server_storage_backend/local_backend.py",
    "lmcache/storage_backend/evictor/__init__.py",
    "lmcache/storage_backend/evictor/base_evictor.py",
    "lmcache/utils.py",
    "lmcache/v1/cache_engine.py",
    "lmcache/v1/memory_management.py",
    "lmcache/v1/metadata.py",
    "lmcache/v1/protocol.py",
    "lmcache/v1/server/__main__.py",
    "lmcache/v1/server/storage_backend/__init__.py",
    "lmcache/v1/server/storage_backend/abstract_backend.py",
    "lmcache/v1/server/storage_backend/local_backend.py",
    "lmcache/v1/server/utils.py",
    "lmcache/v1/storage_backend/connector/base_connector.py",
    "lmcache/v1/storage_backend/connector/lm_connector.py",
    "lmcache/v1/storage_backend/connector/redis_connector.py",
    "lmcache/v1/storage_backend/job_executor/base_executor.py",
    "lmcache/v1/storage_backend/job_executor/pq_executor.py",
    "lmcache/v1/token_database.py",
    "mooncake/__init__.py",
    "mooncake/_store.",
    "mooncake/libasio.so",
    "mooncake/libetcd_wrapper.so",
    "mooncake/mooncake_master",
    "mooncake/store/",
    "mooncake_transfer_engine_cuda13.libs/",
    "sglang/srt/disaggregation/kv_events.py",
    "sglang/srt/mem_cache/base_prefix_cache.py",
    "sglang/srt/mem_cache/cache_init_params.py",
    "sglang/srt/mem_cache/cpp_utils/native_hash.py",
    "sglang/srt/mem_cache/events.py",
    "sglang/srt/mem_cache/evict_policy.py",
    "sglang/srt/mem_cache/radix_cache.py",
    "sglang/srt/mem_cache/utils.py",
    "sglang/srt/utils/network.py",
    "sglang/srt/mem_cache/utils.py",
)


def main(wheel: str) -> None:
    """Extracts FILES and the metadata; checks each file's hash against RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = (n for n in names if n.endswith(".dist-info/RECORD"))
        hashes = dict(line.split(",")[:2] for line in archive.read(record).decode().splitlines())
        metadata = record.replace("RECORD", "METADATA")
        starts = tuple(name for name in FILES if name.endswith(("/", ".")))
        for name in [n for n in names if n in FILES or n.startswith(starts)] + [metadata]:
            digest = hashlib.sha256(archive.read(name)).digest()
            encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if hashes[name] != f"sha256={encoded}":
                raise SystemExit(f"{name} differs from the wheel's RECORD")
            path = archive.extract(name, sysconfig.get_path("purelib"))
            if archive.getinfo(name).external_attr >> 16 & 0o111:
                os.chmod(path, 0o755)


if __name__ == "__main__":
    main(sys.argv[1])
