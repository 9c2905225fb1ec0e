"""Steps LMCache's own remote connectors: a JSON command a line on stdin, an answer on stdout.

`open` url, model, world, worker, dtype, shape, mla: connects; the answer has version and bytes.
`put` hash, seed: stores the chunk whose bytes lmcode.content makes.
`get` hash: answers shape, dtype, format and the bytes' sha256, or null.
`exists` hash. `key` hash: the key's text. An error has {"ok": false}.
"""

import hashlib
import json
import sys

import lmcode


async def step(client, command: dict) -> dict:
    """Does one command; returns what it has to say."""
    op, chunk_hash = command["op"], int(command.get("hash", 0))
    if op == "put":
        data = lmcode.content(command["seed"], client.bytes())
        await client.put(chunk_hash, client.chunk(data))
        return {}
    if op == "exists":
        return {"there": bool(await client.exists(chunk_hash))}
    if op == "key":
        return {"key": client.key(chunk_hash).to_string()}
    if op != "get":
        raise ValueError(f"unknown op {op}")
    chunk = await client.get(chunk_hash)
    if chunk is None:
        return {"chunk": None}
    return {
        "chunk": {
            "shape": list(chunk.shape),
            "dtype": chunk.element.name,
            "format": chunk.fmt.value,
            "sha256": hashlib.sha256(chunk.byte_array).hexdigest(),
        }
    }


async def main(loop):
    """Answers commands until stdin ends."""
    client = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        try:
            if command["op"] == "open":
                kept = {k: v for k, v in command.items() if k not in ("op", "dtype")}
                client = lmcode.Client(loop=loop, element=command["dtype"], **kept)
                answer = {"version": lmcode.WHEEL_VERSION, "bytes": client.bytes()}
            else:
                answer = await step(client, command)
            answer["ok"] = True
        except Exception as err:  # noqa: BLE001  # whatever it is, the test shows it
            answer = {"ok": False, "error": repr(err)}
        print(json.dumps({"op": command["op"], **answer}), flush=True)


if __name__ == "__main__":
    lmcode.run(main)
