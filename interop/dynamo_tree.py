"""Feeds router events into Dynamo's own radix tree and asks it what its router would see.

A JSON object a line on stdin:

    {"worker_id":…,"event":{…},…}           a router event, as we write it
    {"timestamp":…,"event":{"worker_id":…}}  the same, as a recorder's file has it
    {"query":{"tokens":[…],"block_size":16}} what each worker has of a prompt; more fields: lora_name,
                                            cache_salt, eagle, and mm (block_mm_infos)
    {"dump":true}                           the trees, as router events

An event has no answer, unless Dynamo refuses it: {"error":"…","line":n}. A query answers
{"hashes":[…],"scores":[{"tier":"device","worker":7,"dp_rank":0,"blocks":2}]}; a dump {"dump":[…]}.
Dynamo's tree knows no tiers; each tier of storage has a tree of its own here.
"""

import json
import sys

from dynamo import _core


class Trees:
    """Dynamo's trees by tier."""

    def __init__(self):
        self.tiers = {}

    def apply(self, router_event: dict):
        """Applies one router event to the tree of its tier."""
        tier = router_event.get("storage_tier", "device")
        tree = self.tiers.setdefault(tier, _core.RadixTree())
        event = json.dumps(router_event["event"]).encode()
        tree.apply_event(router_event["worker_id"], event)

    def scores(self, hashes: list) -> list:
        """Returns how many blocks of a prompt each worker has, by tier."""
        return [
            {"tier": tier, "worker": worker, "dp_rank": rank, "blocks": blocks}
            for tier, tree in sorted(self.tiers.items())
            for (worker, rank), blocks in sorted(tree.find_matches(hashes).scores.items())
        ]

    def dump(self) -> list:
        """Returns the router events of all trees."""
        events = []
        for tier, tree in sorted(self.tiers.items()):
            for text in tree.dump_tree_as_events():
                events.append({**json.loads(text), "storage_tier": tier})
        return events


def hashes(tokens, block_size, lora_name=None, cache_salt=None, eagle=None, mm=None) -> list:
    """Returns the block hashes that Dynamo computes."""
    return _core.compute_block_hash_for_seq(
        tokens, block_size, mm, lora_name, eagle, cache_namespace=cache_salt
    )


def answer(trees: Trees, doc: dict):
    """Does what a line says; returns its answer, or None."""
    if "query" in doc:
        found = hashes(**doc["query"])
        return {"hashes": found, "scores": trees.scores(found)}
    if "dump" in doc:
        return {"dump": trees.dump()}
    trees.apply(doc["event"] if "timestamp" in doc else doc)
    return None


def main():
    trees = Trees()
    for number, line in enumerate(sys.stdin, 1):
        try:
            said = answer(trees, json.loads(line))
        except Exception as err:
            said = {"error": f"{type(err).__name__}: {err}", "line": number}
        if said is not None:
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
