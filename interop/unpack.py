"""Copies the vLLM, LMCache or SGLang files under test from a wheel into the running venv, unchanged."""

import base64
import hashlib
import sys
import sysconfig
import zipfile

FILES = (
    "vllm/distributed/kv_events.py",
    "vllm/envs.py",
    "vllm/utils/hashing.py",
    "vllm/utils/math_utils.py",
    "vllm/utils/network_utils.py",
    "vllm/v1/core/kv_cache_utils.py",
    "lmcache/protocol.py",
    "lmcache/server/__main__.py",
    "lmcache/server/server_storage_backend/__init__.py",
    "lmcache/server/server_storage_backend/abstract_backend.py",
    "lmcache/server/server_storage_backend/local_backend.py",
    "lmcache/storage_backend/evictor/__init__.py",
    "lmcache/storage_backend/evictor/base_evictor.py",
    "lmcache/utils.py",
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
    "sglang/srt/mem_cache/utils.py",
)


def main(wheel: str) -> None:
    """Extracts FILES, the metadata and the RECORD; checks each file's hash against RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (record,) = (n for n in names if n.endswith(".dist-info/RECORD"))
        hashes = dict(line.split(",")[:2] for line in archive.read(record).decode().splitlines())
        metadata = record.replace("RECORD", "METADATA")
        for name in [n for n in FILES if n in names] + [metadata]:
            digest = hashlib.sha256(archive.read(name)).digest()
            encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            if hashes[name] != f"sha256={encoded}":
                raise SystemExit(f"{name} differs from the wheel's RECORD")
            archive.extract(name, sysconfig.get_path("purelib"))


if __name__ == "__main__":
    main(sys.argv[1])
