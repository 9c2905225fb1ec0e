"""Measures LMCache's own client against an lm:// or Redis server and prints one JSON line.

{"client": "lmcache 0.5.6", "url": …, "put_gb_per_s": {"1048576": …}, "get_gb_per_s": {…}}:
of each size the best of --rounds, in 10⁹ bytes of values a second. A PUT over lm:// has no
reply, so a round of PUTs ends when the server has answered an EXIST behind them.
"""

import argparse
import json
import time

import lmcode

MODEL, HIDDEN, LAYERS = "bench", 1024, 2


def shape_of(size: int) -> list[int]:
    """Returns [2, layers, tokens, hidden] of bfloat16 with so many bytes."""
    token = 2 * LAYERS * HIDDEN * 2
    if size % token:
        raise SystemExit(f"size {size}: want a multiple of {token}")
    return [2, LAYERS, size // token, HIDDEN]


async def measure(client, count: int) -> tuple[float, float]:
    """Puts and gets count chunks, one after the other as LMCache does; returns seconds of each."""
    chunks = [client.chunk(lmcode.content(str(i), client.bytes())) for i in range(count)]
    start = time.perf_counter()
    for i, chunk in enumerate(chunks):
        await client.put(i, chunk)
    if not await client.exists(count - 1):
        raise SystemExit("the server did not keep what was put")
    put = time.perf_counter()
    for i in range(count):
        chunk = await client.get(i)
        if chunk is None:
            raise SystemExit("the server did not give what was put")
    get = time.perf_counter()
    for i in range(count):
        chunk = await client.get(i)
        if chunk.byte_array != chunks[i].byte_array:
            raise SystemExit("the server gave other bytes")
    return put - start, get - put


async def main(loop):
    """Measures every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--size", type=int, action="append", help="bytes of a value")
    parser.add_argument("--bytes", type=int, default=128 << 20, help="put and got in a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    doc = {"client": f"lmcache {lmcode.WHEEL_VERSION}", "url": args.url}
    doc |= {"put_gb_per_s": {}, "get_gb_per_s": {}}
    for size in args.size or [1 << 20, 4 << 20]:
        count = max(args.bytes // size, 1)
        client = lmcode.Client(args.url, loop, MODEL, 1, 0, "bfloat16", shape_of(size))
        rounds = [await measure(client, count) for _ in range(args.rounds)]
        for name, seconds in zip(("put", "get"), zip(*rounds)):
            doc[f"{name}_gb_per_s"][size] = round(count * size / min(seconds) / 1e9, 3)
        await client.connector.close()
    print(json.dumps(doc))


if __name__ == "__main__":
    lmcode.run(main)
