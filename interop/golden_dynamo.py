"""Writes what Dynamo's publishers, tree and recorder yield to ../subscriber/testdata/dynamo.

golden.json has router events of 1.6.1: its event plane's messages (msgpack in an envelope; the
text is the same in JSON) of a publisher that is called, and of one that reads an engine's ZeroMQ
stream; and its tree's dump. recorder.json has the lines that the last recorder, 0.9.1, wrote of
router events that its own publisher sent. Clocks and publishers' numbers are replaced. --check
compares instead.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "subscriber" / "testdata" / "dynamo"
WORKER, PUBLISHER, CLOCK = 7, 4242424242424242, 1790000000000
MM = {"mm_objects": [{"mm_hash": 2**63 + 5, "offsets": [[1, 3]]}]}
MEDIA = ("GPU", "CPU", "CPU_PINNED", "STORAGE", "DISK", "EXTERNAL", None)
DROPPED = ("FS", "OBJ", "LocalCPUBackend", "cpu")


class Server:
    """A NATS server of this repository's version, and a connection that sees all of it."""

    def __init__(self):
        binary = HERE / ".venv" / "nats-server"
        build = ["go", "build", "-o", binary, "github.com/nats-io/nats-server/v2"]
        subprocess.run(build, check=True, cwd=HERE.parent)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.folder = tempfile.TemporaryDirectory()
        args = ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", self.folder.name]
        self.process = subprocess.Popen([binary, *args], stderr=subprocess.DEVNULL)
        os.environ["NATS_SERVER"] = f"nats://127.0.0.1:{self.port}"

    async def connect(self):
        for _ in range(100):
            try:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.1)
        await self.reader.readline()
        self.writer.write(b'CONNECT {"verbose":false}\r\nSUB *.> 1\r\nPING\r\n')
        while not (await self.reader.readline()).startswith(b"PONG"):
            pass

    def publish(self, subject: str, payload: bytes):
        self.writer.write(f"PUB {subject} {len(payload)}\r\n".encode() + payload + b"\r\n")

    async def read(self) -> tuple[str, bytes]:
        """Returns the next message about KV events that is no answer to one."""
        while True:
            words = (await asyncio.wait_for(self.reader.readline(), 20)).split()
            if words[0] == b"PING":
                self.writer.write(b"PONG\r\n")
            if words[0] != b"MSG":
                continue
            payload = (await self.reader.readexactly(int(words[-1]) + 2))[:-2]
            if words[1].startswith(b"namespace") and words[1].endswith(b"kv-events"):
                return words[1].decode(), payload

    def close(self):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def entry(name: str, source: str, text: str, **more) -> dict:
    """Returns an entry: the text, and what it says in plain fields."""
    doc = json.loads(text)
    router, stamp = (doc["event"], doc["timestamp"]) if "timestamp" in doc else (doc, None)
    event = router["event"]
    kind = event["data"] if isinstance(event["data"], str) else next(iter(event["data"]))
    data = {} if kind == "cleared" else event["data"][kind]
    blocks = data.get("blocks", [])
    return {
        "name": name,
        "version": metadata.version("ai-dynamo-runtime"),
        "source": source,
        "text": text,
        **more,
        "event": {
            "kind": kind,
            "worker": router["worker_id"],
            "dp_rank": event["dp_rank"],
            "tier": router.get("storage_tier"),
            "event_id": event["event_id"],
            "parent": data.get("parent_hash"),
            "start_position": data.get("start_position"),
            "hashes": [b["block_hash"] for b in blocks] or data.get("block_hashes", []),
            "tokens_hashes": [b["tokens_hash"] for b in blocks],
            "session_id": router.get("session_id"),
            "timestamp": stamp,
        },
    }


def steps(call, send):
    """Yields (name, doer): what the publisher is called to publish, then what an engine sends."""
    tokens = list(range(1, 13))
    yield "stored", lambda: call.publish_stored(tokens[:8], [4, 4], [100, 101])
    yield "stored-parent", lambda: call.publish_stored(tokens[8:], [4], [-2], 101)
    yield (
        "stored-lora-salt",
        lambda: call.publish_stored(tokens[:4], [4], [103], lora_name="my-lora", cache_salt="s-1"),
    )
    yield (
        "stored-mm",
        lambda: call.publish_stored(tokens[8:], [4], [104], 101, block_mm_infos=[MM]),
    )
    yield "removed", lambda: call.publish_removed([-2, 104])
    stored = {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
        "lora_id": None,
    }
    for number, medium in enumerate(MEDIA):
        doc = {**stored, "block_hashes": [200 + number], "medium": medium}
        yield f"engine-stored-{str(medium).lower()}", lambda doc=doc: send([doc])
    # None of these has an event of Dynamo's; they ride before one that has.
    lost = [{**stored, "block_hashes": [250], "medium": medium} for medium in DROPPED]
    lost.append({**stored, "block_hashes": [251], "medium": "GPU", "locality": "REMOTE"})
    doc = {"type": "BlockRemoved", "block_hashes": [201], "medium": "CPU"}
    yield "engine-removed-cpu", lambda: send([*lost, doc])
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]
    doc = {**stored, "block_hashes": [300], "token_ids": pairs, "medium": "GPU"}
    yield "engine-bigrams", lambda doc=doc: send([doc])
    doc = {**stored, "block_hashes": [301], "medium": "GPU"}
    doc |= {"cache_salt": "salt-1", "session_id": "s-42"}
    yield "engine-salt-session", lambda doc=doc: send([doc])
    doc = {**stored, "block_hashes": [302], "token_ids": [], "block_size": 0, "medium": "CPU"}
    yield "engine-placeholder", lambda doc=doc: send([doc])
    yield "engine-cleared", lambda: send([{"type": "AllBlocksCleared"}])


async def event_plane(server):
    """Yields the entries of Dynamo 1.6.1's publishers."""
    import msgpack
    import zmq
    from dynamo import _core

    loop = asyncio.get_running_loop()
    runtime = _core.DistributedRuntime(loop, "mem", "tcp", event_plane="nats")
    endpoint = runtime.endpoint("ns.backend.generate")
    # An XPUB is a PUB that tells when it has been subscribed to.
    engine = zmq.Context.instance().socket(zmq.XPUB)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    called = _core.KvEventPublisher(endpoint, WORKER, 4, 2, True)
    relay = _core.KvEventPublisher(
        endpoint, WORKER + 1, 4, 0, True, zmq_endpoint=f"tcp://127.0.0.1:{port}", zmq_topic=""
    )
    if not await loop.run_in_executor(None, engine.poll, 20000):
        raise SystemExit("Dynamo's listener does not subscribe to the engine's stream")
    sequence = 0

    def send(events):
        nonlocal sequence
        payload = msgpack.packb([1.5, events, 0])
        engine.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
        sequence += 1

    for name, do in steps(called, send):
        do()
        subject, payload = await server.read()
        envelope = msgpack.unpackb(payload)
        for field, fixed in (("publisher_id", PUBLISHER), ("published_at", CLOCK)):
            payload = payload.replace(msgpack.packb(envelope[field]), msgpack.packb(fixed))
        (router,) = msgpack.unpackb(envelope["payload"])
        text = json.dumps(router, separators=(",", ":"))
        yield entry(name, "event plane", text, subject=subject, envelope_hex=payload.hex())
    relay.shutdown()


def tree():
    """Yields the entries of Dynamo's tree: what it dumps after some events."""
    from dynamo import _core

    radix = _core.RadixTree()
    found = _core.compute_block_hash_for_seq(list(range(1, 13)), 4)
    names = zip((100, 101, 2**64 - 2), found)
    blocks = [{"block_hash": name, "tokens_hash": local} for name, local in names]
    last = {**blocks[2], "mm_extra_info": MM}
    for worker, rank, data in (
        (7, 0, {"stored": {"parent_hash": None, "blocks": blocks[:2]}}),
        (7, 0, {"stored": {"parent_hash": 101, "start_position": 2, "blocks": [last]}}),
        (8, 3, {"stored": {"parent_hash": None, "blocks": blocks[:1]}}),
    ):
        event = {"event_id": 0, "data": data, "dp_rank": rank}
        radix.apply_event(worker, json.dumps(event).encode())
    for number, text in enumerate(sorted(radix.dump_tree_as_events())):
        yield entry(f"dump-{number}", "tree", text)
    # Nothing here sends a start position or the other domain; Dynamo's tree reads them, though.
    data = {"stored": {"parent_hash": 101, "start_position": 2, "blocks": [last]}}
    event = {"event_id": 3, "data": data, "dp_rank": 0}
    radix.apply_event(7, json.dumps(event).encode())
    router = {"worker_id": 7, "storage_tier": "external", "residency_domain": "cache_owner"}
    text = json.dumps({**router, "event": event}, separators=(",", ":"))
    yield entry("stored-start-position", "reference", text)


async def record(server) -> list:
    """Returns the lines of the recorder of Dynamo 0.9.1."""
    from dynamo import _core

    runtime = _core.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", True)
    component = runtime.namespace("ns").component("backend")
    path = Path(server.folder.name) / "recorder.jsonl"
    recorder = _core.KvRecorder(component, str(path))
    publisher = _core.KvEventPublisher(component, WORKER, 4, 2)
    await asyncio.sleep(1)  # the recorder does not say when it has subscribed
    publisher.publish_stored(0, list(range(1, 9)), [4, 4], [100, 101], 0, None)
    publisher.publish_stored(1, list(range(9, 13)), [4], [-2], 0, 101)
    publisher.publish_removed(2, [-2])
    sent = [(await server.read())[1] for _ in range(3)]
    worker = json.loads(sent[0])["worker_id"]
    sent = [line.replace(str(worker).encode(), str(WORKER).encode()) for line in sent]
    block = {"block_hash": 2**64 - 2, "tokens_hash": 2, "mm_extra_info": MM}
    stored = {"stored": {"parent_hash": None, "blocks": [block]}}
    for number, data in enumerate((stored, {"removed": {"block_hashes": [2**64 - 2]}}, "cleared")):
        event = {"event_id": number, "data": data, "dp_rank": 1}
        sent.append(json.dumps({"worker_id": 8, "event": event}).encode())
    for number, line in enumerate(sent, 1):
        server.publish("namespace.ns.component.backend.kv-events", line)
        while await recorder.event_count() < number:
            await asyncio.sleep(0.02)
    recorder.shutdown()
    lines = []
    while len(lines) < len(sent):
        await asyncio.sleep(0.05)
        lines = path.read_text().splitlines()
    stamps = [json.loads(line)["timestamp"] for line in lines]
    if stamps != sorted(stamps):
        raise SystemExit("the recorder's clock runs backwards")
    return [
        line.replace(f'"timestamp":{stamp}', f'"timestamp":{1000 + 100 * number}', 1)
        for number, (line, stamp) in enumerate(zip(lines, stamps))
    ]


async def emit():
    """Prints this venv's part; runs inside a venv."""
    server = Server()
    try:
        await server.connect()
        if metadata.version("ai-dynamo-runtime").startswith("0."):
            lines = await record(server)
            entries = [entry(f"recorded-{n}", "recorder", line) for n, line in enumerate(lines)]
        else:
            entries = [e async for e in event_plane(server)] + list(tree())
    finally:
        server.close()
    print(json.dumps(entries), flush=True)
    os._exit(0)  # the runtime's threads do not end


def gather(venv: str) -> list:
    """Returns the entries that a venv's own code yields."""
    python = HERE / ".venv" / venv / "bin" / "python"
    done = subprocess.run([python, __file__, "--emit"], check=False, capture_output=True)
    if done.returncode:
        sys.stderr.buffer.write(done.stderr)
        raise SystemExit(f"{venv} failed; its log is above")
    return json.loads(done.stdout)


def main() -> int:
    """Runs what the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="*", metavar="NAME", help="compare instead of write")
    parser.add_argument("--emit", action="store_true", help="print this venv's entries")
    args = parser.parse_args()
    if args.emit:
        asyncio.run(emit())
    files = {"dynamo": OUT / "golden.json", "dynamo-recorder": OUT / "recorder.json"}
    OUT.mkdir(parents=True, exist_ok=True)
    for venv in args.check or files:
        path, entries = files[venv], gather(venv)
        if args.check is None:
            path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")
            print(f"dynamo/{path.name}: {len(entries)} entries")
        elif json.loads(path.read_text()) != entries:
            print(f"dynamo/{path.name} differs from what Dynamo yields", file=sys.stderr)
            return 1
        else:
            print(f"dynamo/{path.name}: {len(entries)} entries are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
