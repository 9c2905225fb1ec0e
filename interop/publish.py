"""Steps vLLM's ZmqEventPublisher: a JSON command a line in, a JSON answer a line out.

Run by a venv's Python. README.md describes the commands. Only the PUB socket's send is
wrapped, to note what is sent and to swallow it when told to; sequence numbers, encoding,
the replay buffer and the replay service are vLLM's.
"""

import json
import os
import queue
import sys
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

import kvevents as kv

# From 0.31 vLLM binds tcp://*:0 to this address; before, to all of them.
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

SHOWN = 100  # an answer carries the payloads of at most so many batches


class Tap:
    """Stands before the PUB socket; notes each send and swallows it when told to."""

    def __init__(self, socket):
        self.socket = socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.swallow = False
        self.sends = queue.SimpleQueue()

    def send_multipart(self, frames):
        if not self.swallow:
            self.socket.send_multipart(frames)
        self.sends.put(frames)

    def close(self, linger):
        self.socket.disable_monitor()
        self.socket.close(linger=linger)


class SteppedPublisher(kv.events.ZmqEventPublisher):
    """vLLM's publisher with a Tap; knows where its sockets were bound."""

    def _socket_setup(self):
        super()._socket_setup()
        self.bound = {"endpoint": last_endpoint(self._pub)}
        if self._replay is not None:
            self.bound["replay_endpoint"] = last_endpoint(self._replay)
        self._pub = Tap(self._pub)


def last_endpoint(socket) -> str:
    """Returns where a client on this machine reaches the socket."""
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:")


def wildcard(given: str, bound: str, rank: int) -> str:
    """Returns an endpoint that makes vLLM bind again where port 0 was bound before."""
    if not given.endswith(":0"):
        return given
    return f"tcp://*:{int(bound.rpartition(':')[2]) - rank}"


class Session:
    """One publisher at a time and the commands that step it."""

    def open(self, endpoint, replay_endpoint=None, dp_rank=0, **options):
        """Starts a publisher as vLLM would; options are its constructor's."""
        self.options = {"endpoint": endpoint, "data_parallel_rank": dp_rank, **options}
        if replay_endpoint is not None:
            self.options["replay_endpoint"] = replay_endpoint
        return self._start()

    def _start(self):
        deadline = time.monotonic() + 5
        while True:
            try:
                self.publisher = SteppedPublisher(**self.options)
                break
            except zmq.ZMQError as error:  # libzmq gives a closed port back a little later
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.next_seq = 0
        return {
            "version": kv.WHEEL_VERSION,
            "fields": kv.FIELDS,
            **self.publisher.bound,
        }

    def wait(self, n=1, timeout=5.0):
        """Waits until n subscribers have connected and their subscriptions had time to come."""
        deadline = time.monotonic() + timeout
        for seen in range(n):
            left = max(0, int((deadline - time.monotonic()) * 1000))
            if not self.publisher._pub.monitor.poll(left):
                raise TimeoutError(f"{seen} of {n} subscribers connected")
            recv_monitor_message(self.publisher._pub.monitor)
        time.sleep(0.1)
        return {}

    def publish(self, events=None, ts=None, n=1, pad=0, drop=False):
        """Publishes n batches of the events, or of a made-up block each, padded by so many bytes."""
        tap = self.publisher._pub
        tap.swallow = drop
        first, batches, lacking = self.next_seq, [], set()
        for _ in range(n):
            docs = events if events is not None else [made_up(self.next_seq, pad)]
            batch, missing = kv.batch_from_json(time.time() if ts is None else ts, docs)
            lacking.update(missing)
            self.publisher.publish(batch)
            topic, seq, payload = tap.sends.get(timeout=5)
            self.next_seq = int.from_bytes(seq, "big") + 1
            batches.append({"seq": self.next_seq - 1, "hex": payload.hex()})
        return {
            "first": first,
            "last": self.next_seq - 1,
            "topic": topic.decode(),
            "sent": not drop,
            "lacking": sorted(lacking),
            "batches": batches if n <= SHOWN else [],
        }

    def drop(self, **arguments):
        """Publishes as publish does, into the replay buffer but not onto the live socket."""
        return self.publish(drop=True, **arguments)

    def hole(self):
        """Publishes a batch that cannot be encoded: its seq is used up, replay lacks it."""
        batch = kv.events.KVEventBatch(ts=0.0, events=[object()])
        self.publisher.publish(batch)
        self.next_seq += 1
        return {"first": self.next_seq - 1, "last": self.next_seq - 1, "sent": False}

    def restart(self):
        """Shuts down and starts anew on the same endpoints; seq restarts at 0."""
        self.publisher.shutdown()
        rank = self.options["data_parallel_rank"]
        for name, bound in self.publisher.bound.items():
            self.options[name] = wildcard(self.options[name], bound, rank)
        return self._start()

    def close(self):
        """Shuts the publisher down; another may be opened."""
        self.publisher.shutdown()
        return {}


def made_up(seq: int, pad: int) -> dict:
    """Describes a GPU block that no other seq has; the padding is its adapter's name."""
    return {
        "type": "BlockStored",
        "block_hashes": [1_000_000 + seq],
        "token_ids": list(range(seq, seq + 16)),
        "block_size": 16,
        "medium": "GPU",
        "lora_name": "x" * pad or None,
    }


def main():
    """Answers each line of stdin; an error is an answer, not an end."""
    session = Session()
    commands = {
        name: getattr(session, name)
        for name in ("open", "wait", "publish", "drop", "hole", "restart", "close")
    }
    for line in sys.stdin:
        command = {}
        try:
            command = json.loads(line)
            op = command.pop("op")
            answer = {"ok": True, "op": op, **commands[op](**command)}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
