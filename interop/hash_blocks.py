"""Hashes requests with vLLM's own request hasher (`.venv/NAME/bin/python hash_blocks.py`).

A JSON request a line on stdin, an answer a line on stdout. A request has algo, seed, block_size,
tokens, and perhaps lora, salt, embeds (hex, one a block) and items ([identifier, offset, length]…);
an answer has, for each full block, digests (hex), ints and keys (hex: as events carry them).
"""

import json
import sys

import msgspec

import golden_hashes as golden
import kvevents as kv


def answer(doc: dict) -> dict:
    """Hashes one request."""
    hasher = golden.Hasher(kv, doc["algo"], doc["seed"])
    utils, size, tokens = hasher.utils, doc["block_size"], doc["tokens"]
    request = golden.request(
        *(golden.item(*place) for place in doc.get("items") or ()),
        lora=doc.get("lora"),
        salt=doc.get("salt"),
    )
    request.all_token_ids, request.num_tokens, request.block_hashes = tokens, len(tokens), []
    starts = range(0, len(tokens) - size + 1, size)
    if embeds := doc.get("embeds"):
        request.prompt_embeds = True
        request._prompt_embeds_per_block_hashes = {
            (start, start + size): bytes.fromhex(text) for start, text in zip(starts, embeds)
        }
    digests = utils.get_request_block_hasher(size, hasher.function)(request)
    keys, item = [], 0
    for start in starts:
        extra, item = utils.generate_block_hash_extra_keys(request, start, start + size, item)
        keys.append(extra)
    published = getattr(utils, "to_event_extra_keys", list)(keys) or []
    return {
        "digests": [digest.hex() for digest in digests],
        "ints": [utils.maybe_convert_block_hash(digest) for digest in digests],
        "keys": [msgspec.msgpack.encode(extra).hex() for extra in published],
    }


def main() -> None:
    """Answers until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
