"""Reads a publisher with vLLM's own classes and prints each batch as a JSON line.

Run by a venv's Python. Connects (or binds) a SUB socket, prints {"kind": "ready"} when the
publisher's handshake is done, then the live batches; with --replay-endpoint it then asks for
a replay as a DEALER. The decoder is the wheel's typed one, so a batch that this vLLM would
refuse ends the run with {"kind": "error"} and exit status 1.
"""

import argparse
import json
import sys
import time

import msgspec
import zmq

import kvevents as kv

END_SEQ = kv.events.ZmqEventPublisher.END_SEQ
decoder = msgspec.msgpack.Decoder(type=kv.events.KVEventBatch)


def say(kind: str, **fields):
    """Prints a line."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def receive(socket, deadline: float):
    """Returns the next message's frames; raises TimeoutError at the deadline."""
    if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        raise TimeoutError
    return socket.recv_multipart()


def say_batch(kind: str, frames: list[bytes]):
    """Decodes topic (if any), seq and payload, which are last, and prints them."""
    seq, payload = frames[-2:]
    fields = {"frames": len(frames), "seq": int.from_bytes(seq, "big")}
    if kind == "live" or len(frames) > 3:
        fields["topic"] = frames[-3].decode()
    batch = kv.batch_to_json(decoder.decode(payload))
    say(kind, **fields, hex=payload.hex(), **batch)


def live(args, deadline: float):
    """Prints --count live batches."""
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.set_hwm(0)
    socket.setsockopt_string(zmq.SUBSCRIBE, args.topic)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    if args.bind:
        socket.bind(args.endpoint)
    else:
        socket.connect(args.endpoint)
    receive(monitor, deadline)
    say("ready")
    for _ in range(args.count):
        say_batch("live", receive(socket, deadline))


def replay(args, deadline: float):
    """Prints the batches that a replay from --replay-start brings, up to the end mark."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(args.replay_endpoint)
    socket.send_multipart((b"", args.replay_start.to_bytes(8, "big")))
    while True:
        frames = receive(socket, deadline)
        if frames[-2] == END_SEQ:
            say("end", frames=len(frames), hex=[frame.hex() for frame in frames])
            return
        say_batch("replay", frames)


def main() -> int:
    """Parses the flags and runs the live part, then the replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", help="live PUB socket; without it there is no live part")
    parser.add_argument("--bind", action="store_true", help="bind the SUB socket")
    parser.add_argument("--topic", default="", help="topic prefix")
    parser.add_argument("--count", type=int, default=1, help="live batches to read")
    parser.add_argument("--replay-endpoint", help="ROUTER socket to ask for a replay")
    parser.add_argument("--replay-start", type=int, default=0, help="first seq to replay")
    parser.add_argument("--timeout", type=float, default=10, help="seconds for the whole run")
    args = parser.parse_args()
    deadline = time.monotonic() + args.timeout
    try:
        if args.endpoint:
            live(args, deadline)
        if args.replay_endpoint:
            replay(args, deadline)
    except TimeoutError:
        say("timeout")
        return 1
    except (msgspec.MsgspecError, ValueError) as error:
        say("error", error=f"{type(error).__name__}: {error}")
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    status = main()
    zmq.Context.instance().destroy(linger=0)
    sys.exit(status)
