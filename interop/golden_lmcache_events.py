"""Writes what LMCache's own code puts into vLLM's event stream to
../subscriber/testdata/lmcache/golden.json, in the form of vLLM's golden.json.

engine-…: LMCacheEngine.store and vLLM's LMCacheConnectorV1, the connector inside of vLLM's process.
mp-…: LMCache's connector for its own server's process. What these classes lean on is stubbed: no
memory is copied, and no server runs. --check compares with the file instead.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "lmcache" / "golden.json"
CHUNK = 8
TOKENS = list(range(101, 121))
ALGORITHMS = ("builtin", "sha256_cbor")


class Mask:
    """As much of a tensor of booleans as LMCache reads: the first ones are false."""

    def __init__(self, size: int, false: int):
        self.size, self.false = size, false

    def __len__(self):
        return self.size

    def numel(self):
        return self.size

    def long(self):
        return self

    def sum(self):
        return self

    def item(self):
        return self.size - self.false


class Metric:
    """A metric of Prometheus that counts nothing."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: Metric()


def load():
    """Returns LMCache's and vLLM's modules under test."""
    import lmcode as lm

    torch = sys.modules["torch"]
    torch.inference_mode = lambda: lambda function: function
    torch.sum = lambda mask: mask
    prometheus = types.ModuleType("prometheus_client")
    prometheus.Counter = prometheus.Gauge = prometheus.Histogram = Metric
    sys.modules["prometheus_client"] = prometheus
    kv, hashing = importlib.import_module("vllm.v1.core.kv_cache_utils"), sys.modules["kvevents"]
    hashing.load_hashing()
    module = sys.modules["vllm.utils"]
    module.__class__ = types.ModuleType
    del module.__path__
    adapter = "lmcache.integration.vllm.vllm_multi_process_adapter"
    return types.SimpleNamespace(
        lm=lm,
        kv=kv,
        events=hashing.events,
        to_json=hashing.batch_to_json,
        engine=importlib.import_module("lmcache.v1.cache_engine"),
        adapter=importlib.import_module(adapter),
        mp=importlib.import_module("lmcache.integration.vllm.lmcache_mp_connector"),
        connector=importlib.import_module(
            "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
        ),
    )


def engine(m, algorithm: str):
    """Returns LMCache's engine with its real token database, over no memory."""
    config = types.SimpleNamespace(
        pre_caching_hash_algorithm=algorithm,
        chunk_size=CHUNK,
        remote_url=None,
        enable_pd=False,
        save_unfull_chunk=False,
        get_extra_config_value=lambda name, default: default,
    )
    metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
        "m", 1, 1, 0, 0, m.lm.torch.half, (1, 2, CHUNK, 1, 1)
    )
    database = importlib.import_module("lmcache.v1.token_database").ChunkedTokenDatabase

    class Engine(m.engine.LMCacheEngine):
        """Its methods, without the start-up that takes a GPU."""

        def __init__(self):
            self.metadata, self.config = metadata, config
            self.token_database = database(config, metadata)
            self.kv_events_enabled, self.kv_events = True, []
            self.fmt = self.store_location = None
            self.gpu_connector, self.storage_manager = mock.MagicMock(), mock.MagicMock()
            self.storage_manager.allocate.return_value.get_size.return_value = 1
            self.stats_monitor = mock.MagicMock()
            stats = self.stats_monitor.on_store_request.return_value
            stats.time_to_store.return_value = 0

        def __getattr__(self, name):
            return mock.MagicMock(return_value=False)

        def is_healthy(self):
            return True

        def is_frozen(self):
            return False

        def _is_passive(self):
            return False

    return Engine()


def in_process(m):
    """Yields what the connector inside of vLLM's process reports."""
    for algorithm in ALGORITHMS:
        cache = engine(m, algorithm)
        side = types.SimpleNamespace(_lmcache_engine=cache)

        def report(side=side):
            method = m.connector.LMCacheConnectorV1.get_kv_connector_kv_cache_events
            return method(side)

        cache.store(TOKENS, mask=Mask(20, 0))
        one = report()
        yield f"engine-{algorithm}-stored", one.get_all_events()
        cache.store(TOKENS[:19] + [7] * 13, mask=Mask(32, 16))
        yield f"engine-{algorithm}-stored-more", report().get_all_events()
        if algorithm != ALGORITHMS[0]:
            continue
        # Two workers: only what both report is kept.
        cache.store(TOKENS, mask=Mask(20, 0))
        both = report()
        cache.store(TOKENS[:17], mask=Mask(17, 0))
        both.add_events(report().get_all_events())
        both.increment_workers()
        yield "engine-two-workers", both.aggregate().get_all_events()


def other_process(m):
    """Yields what the connector for LMCache's own server reports, of a worker that subscribes."""
    adapter = object.__new__(m.adapter.LMCacheMPWorkerAdapter)
    adapter.__dict__.update(
        _kv_events_enabled=True,
        _kv_events=[],
        _kv_event_lock=mock.MagicMock(),
        _kv_event_server_source=True,
        _kv_event_subscriber=True,
        _kv_event_receiver=object(),
        _heartbeat=object(),
        _kv_event_incarnation=None,
        _kv_event_batches=Metric(),
        _kv_event_resyncs=mock.MagicMock(),
        _kv_events_generated=Metric(),
        _kv_events_drained=Metric(),
        _kv_events_buffered=Metric(),
        _announced_kv_hashes=set(),
        lmcache_tokens_per_chunk=CHUNK,
    )
    m.adapter.logger.setLevel("ERROR")
    side = types.SimpleNamespace(_enable_kv_events=True, worker_adapter=adapter)

    def report():
        return m.mp.LMCacheMPConnector.get_kv_connector_kv_cache_events(side).get_all_events()

    def record(kind, *chunks, tokens=(), parent=None):
        return types.SimpleNamespace(
            kind=kind,
            medium="CPU",
            block_hashes=[bytes([chunk]) * 32 for chunk in chunks],
            parent_block_hash=parent,
            token_ids=list(tokens),
        )

    def batch(*records, incarnation=1, lost=False):
        adapter._apply_kv_event_batch(
            types.SimpleNamespace(
                enabled=True, incarnation=incarnation, lost=lost, events=list(records)
            )
        )

    stored, removed = m.adapter.KV_EVENT_KIND_STORED, m.adapter.KV_EVENT_KIND_REMOVED
    batch(
        record(stored, 1, tokens=TOKENS[:8]),
        record(stored, 2, tokens=TOKENS[8:16], parent=bytes([1]) * 32),
    )
    yield "mp-stored", report()
    batch(record(removed, 2, 9))
    yield "mp-removed", report()
    batch(record(stored, 2, tokens=TOKENS[8:16], parent=bytes([1]) * 32), lost=True)
    yield "mp-lost", report()
    batch(record(stored, 1, tokens=TOKENS[:8]), incarnation=2)
    yield "mp-server-restarted", report()
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    m.kv.envs = importlib.import_module("vllm.envs")
    batch(record(stored, 3, tokens=TOKENS[:8]), incarnation=2)
    yield "mp-stored-bytes", report()
    # Without such a server the worker tells its own stores, and no removals.
    adapter._kv_event_hasher = types.SimpleNamespace(
        compute_chunk_hashes=lambda tokens, end: [bytes([4 + n]) * 32 for n in range(end // CHUNK)]
    )
    key = types.SimpleNamespace(token_ids=TOKENS, start=8, end=20)
    adapter._buffer_kv_events(adapter._build_store_kv_events(key))
    yield "mp-own-stores", report()


def emit():
    """Prints the entries; runs inside the venv."""
    import msgspec

    m = load()
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(type=m.events.KVEventBatch)
    entries = []
    for name, events in [*in_process(m), *other_process(m)]:
        batch = m.events.KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)
        payload = encoder.encode(batch)
        entries.append({
            "name": name,
            "version": m.lm.WHEEL_VERSION,
            "form": "map",
            "hex": payload.hex(),
            "batch": m.to_json(decoder.decode(payload)),
        })  # fmt: skip
    print(json.dumps(entries))


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare")
    parser.add_argument("--emit", action="store_true", help="print the entries")
    args = parser.parse_args()
    if args.emit:
        emit()
        return 0
    command = [HERE / ".venv" / "lmcache" / "bin" / "python", __file__, "--emit"]
    # Python's own hash, of which LMCache's builtin algorithm is made, needs a seed.
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    said = subprocess.run(command, check=True, capture_output=True, env=env).stdout
    entries = json.loads(said)
    text = "[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n"
    if not args.check:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(text)
        print(f"lmcache/{OUT.name}: {len(entries)} entries")
    elif OUT.read_text() != text:
        print(f"lmcache/{OUT.name} differs from what LMCache's code yields", file=sys.stderr)
        return 1
    else:
        print(f"lmcache/{OUT.name}: {len(entries)} entries are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
