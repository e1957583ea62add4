"""What strangers send to a run: identities, frames and bytes from a generator, as any user.

`attack` runs in a process of its own. It writes down what became of its attempts, and never looks
at an answer: nobody owes it one.
"""

import encodings.idna  # noqa: F401 (another user may not be able to load it)
import json
import os
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import zmq

from shoal.comm.wire import pack
from shoal.elastic import messages
from shoal.sync.server.messages import CheckRequest, WorkerHello

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # of ZeroMQ
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
MOST_AT_ONCE = 20
OTHER = 65_534  # nobody's number, on most machines


def attack(user: int, targets: list[str], count: int, seed: int) -> int:
    """Send so many things, turning from target to target; print what became of them."""
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    draws, told = random.Random(seed), Counter[str]()
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 300)
        while told.total() < count:
            target = draws.choice(targets)
            for way in draws.sample(WAYS, len(WAYS)):
                told.update(way(context, target, draws))
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


def attempts_of(path: Path) -> Counter[str]:
    return Counter(json.loads(path.read_text().splitlines()[-1]))


def as_bytes(context: zmq.Context, target: str, draws: random.Random) -> Iterator[str]:
    """Over a plain connection."""
    for _ in range(draws.randrange(1, 5)):
        try:
            connection = _connected(target)
        except PermissionError:
            yield "forbidden"
            continue
        except OSError as error:
            yield type(error).__name__
            continue
        with connection, suppress(OSError):
            if draws.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for part in draws.choice(BYTES)(draws):
                connection.sendall(part)
        yield "bytes"


def as_frames(context: zmq.Context, target: str, draws: random.Random) -> Iterator[str]:
    """As a peer that speaks ZeroMQ, under any name."""
    if target.startswith("seq://"):  # which ZeroMQ does not speak
        yield from as_bytes(context, target, draws)
        return
    if not _is_allowed(target):
        yield "forbidden"
        return
    kind = draws.choice([zmq.DEALER, zmq.REQ, zmq.PUSH, zmq.ROUTER])
    with closing(context.socket(kind)) as peer:
        peer.setsockopt(zmq.IDENTITY, identity(draws))
        peer.setsockopt(zmq.LINGER, 300)
        peer.setsockopt(zmq.SNDTIMEO, 300)
        with suppress(zmq.ZMQError):
            peer.connect(target)
            for _ in range(1 if kind == zmq.REQ else draws.randrange(1, MOST_AT_ONCE)):
                peer.send_multipart(draws.choice(FRAMES)(draws))
                yield "frames"


WAYS = [as_bytes, as_frames]


def identity(draws: random.Random) -> bytes:
    """Names that are nearly a member's: other digits, no text, a wrong token."""
    number = draws.choice([b"0", b"1", b"-1", b"007", "²".encode(), "٣".encode(), b"9" * 100, b""])
    token = draws.choice([draws.randbytes(16).hex().encode(), b"\xff\xfe", "é".encode(), b"", b":"])
    found = draws.choice([number + b":" + token, draws.randbytes(draws.randrange(1, 255)), token])
    return (found if found and found[0] else b"x" + found)[:255]


def _connected(target: str) -> socket.socket:
    if target.startswith("ipc://"):
        kind = socket.SOCK_STREAM
    elif target.startswith("seq://"):
        kind = socket.SOCK_SEQPACKET
    else:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=2)
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(2)
    try:
        connection.connect(target[6:])
    except OSError:
        connection.close()
        raise
    return connection


def _is_allowed(target: str) -> bool:
    """Whether the kernel would let this user in; ZeroMQ tries for ever and does not say."""
    try:
        _connected(target).close()
    except PermissionError:
        return False
    except OSError:
        return True  # nobody is there
    return True


def _greeted(draws: random.Random) -> list[bytes]:
    """A handshake that goes wrong somewhere."""
    content = bytearray(GREETING + READY + b"\x00\x05hello")
    for _ in range(draws.randrange(4)):
        content[draws.randrange(len(content))] = draws.randrange(256)
    return [bytes(content[: draws.randrange(len(content) + 1)]), draws.randbytes(20)]


def _huge(draws: random.Random) -> list[bytes]:
    """A frame that says it is as large as can be."""
    length = draws.choice([1 << 30, (1 << 63) - 1, (1 << 64) - 1])
    return [GREETING, READY, b"\x02" + length.to_bytes(8, "big"), draws.randbytes(5_000)]


BYTES: list[Callable[[random.Random], list[bytes]]] = [
    lambda draws: [],
    lambda draws: [draws.randbytes(draws.randrange(1, 300))],
    lambda draws: [struct.pack("<q", draws.randrange(1 << 40, 1 << 62)), draws.randbytes(64)],
    lambda draws: [b'{"resize": ', draws.randbytes(9).hex().encode(), b"\n"],
    lambda draws: [b"\xff\xfe\n", b"null\n", b"[[1]]\n"],
    lambda draws: [draws.randbytes(1_000) for _ in range(draws.randrange(80))],
    _greeted,
    _huge,
]


def _nearly(draws: random.Random) -> list[bytes]:
    """What a member or a worker says, from somebody who is none; damaged, now and then."""
    hello = WorkerHello(
        generation=0, request=1, seat=0, secret="x", layout="", num_rows=1, rows=None
    )
    said = draws.choice(
        [
            [messages.encode(messages.Ready(draws.randrange(1 << 22)))],
            [messages.encode(messages.Failed(1, "stranger", "", 1))],
            [messages.encode(messages.Heartbeat(10**6, {"step": "x"}, True))],
            [bytes(part) for part in pack(hello)],
            [
                bytes(part)
                for part in pack(CheckRequest(generation=0, request=1, turn=1), [b"x" * 100])
            ],
        ]
    )
    if draws.random() < 0.5:
        return said
    content = bytearray(said[0])
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    return [bytes(content), *said[1:]]


FRAMES: list[Callable[[random.Random], list[bytes]]] = [
    lambda draws: [b""],
    lambda draws: [draws.randbytes(draws.randrange(200)) for _ in range(draws.randrange(1, 9))],
    lambda draws: [b"\x91" * draws.randrange(1, 5_000)],
    lambda draws: [msgspec.msgpack.encode({"say": draws.choice(["ready", "fly", 7, None])})],
    lambda draws: [b"SHL\x01" + draws.randbytes(draws.randrange(40))],
    lambda draws: [draws.randbytes(200_000)],
    _nearly,
    _nearly,
]
