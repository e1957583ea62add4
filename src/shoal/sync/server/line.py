"""A worker's conversation with its servers: questions out, answers in, each matched by a number.

A question that is not answered in a while is followed by a `Check`, and sent again if that is
answered first, since a connection may have broken under it; servers do what is asked once. So what
is large and takes long is not sent twice. An answer is waited for as long as the group is whole:
who waits for a peer's gradients waits for the peer. Sending is safe from any thread, waiting from
one.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
import zmq
from torch import Tensor

from shoal.comm.door import Passage, enter
from shoal.comm.mesh import Servers
from shoal.comm.wire import BadFrame, connect, pack, unpack
from shoal.errors import GroupLost, ShoalError
from shoal.sync.server.messages import (
    Apply,
    Check,
    Checked,
    Missing,
    Push,
    Pushes,
    Refused,
    ServerMessage,
    Sum,
    WorkerMessage,
)
from shoal.system.processes import giving_way

TICK_MS = 50
AGAIN_S = 2.0
Payload = Sequence[bytes | Tensor]
Left = Sequence[tuple[Push, Payload]]
MOST_BYTES = 1 << 40  # a worker trusts the servers it greeted

_DECODER: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


class NotServed(ShoalError):
    """A server refused what this worker asked."""


class _Asked(NamedTuple):
    """A question without an answer, last sent or asked after at some time."""

    server: int
    frames: list[bytes | memoryview]
    sent: int  # its turn
    at: float


class Line:
    def __init__(self, servers: Servers, seat: int):
        self.servers, self.num_bytes, self.num_received = servers, 0, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = f"{seat}.{servers.generation}.{os.urandom(8).hex()}".encode()
        self._identity = identity
        self._sockets = [
            connect(self._context, address, identity, servers.keys) for address in servers.addresses
        ]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._numbers, self._turns = count(1), count(1)
        self._asked: dict[int, _Asked] = {}
        self._answers: dict[int, tuple[ServerMessage, list[memoryview]]] = {}
        self._left: dict[int, list[tuple[Push, Payload]]] = {}  # not sent yet, by server
        self._told: set[int] = set()  # what nobody answers, in this step
        self._refused = ""  # why some of that was
        self._passages: dict[int, Passage] = {}  # by server of this host
        self._far: set[int] = set()  # servers that were told something by a socket in this step
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sockets)

    def come_near(self, doors: Sequence[str]) -> None:
        """Send what is small through the doors of servers of this host from now on."""
        for server, door in enumerate(doors):
            passage = enter(door) if door else None
            if passage is not None and passage.send(self._identity):
                self._passages[server] = passage
                self._poller.register(passage, zmq.POLLIN)

    def tell(
        self,
        server: int,
        kind: type[WorkerMessage],
        payload: Payload = (),
        **what: Any,
    ) -> None:
        """Send what nobody answers."""
        request, frames = self._message(kind, payload, what)
        self._told.add(request)
        self._tell(server, frames)

    def leave(self, server: int, payload: Payload = (), **what: Any) -> None:
        """Push at the next `flush`, or before the next question at the latest.

        Small pushes then take one message, which costs a server more than what is in it.
        """
        push = Push(generation=self.servers.generation, request=next(self._numbers), **what)
        with self._lock:
            self._told.add(push.request)
            self._left.setdefault(server, []).append((push, payload))

    def forget(self) -> None:
        """Let go of what was left: it is of an attempt that was given up."""
        with self._lock:
            self._left = {}

    def flush(self, least_bytes: int = 0) -> None:
        """Send what was left, to those servers for whom it is at least so much."""
        with self._lock:
            sizes = {server: _num_bytes(pairs) for server, pairs in self._left.items()}
            much = [server for server, num_bytes in sizes.items() if num_bytes >= least_bytes]
            left = {server: self._left.pop(server) for server in much}
        for server, pairs in left.items():
            frames = pack(*pairs[0]) if len(pairs) == 1 else self._together(pairs)
            self._tell(server, frames)

    def _together(self, pairs: Left, then: Apply | Sum | None = None) -> list[bytes | memoryview]:
        """Pushes in one message, and a question after them."""
        pushes, counts = [push for push, _ in pairs], [len(payload) for _, payload in pairs]
        everything = [part for _, payload in pairs for part in payload]
        request, generation = next(self._numbers), self.servers.generation
        self._told.add(request)
        message = Pushes(
            generation=generation, request=request, pushes=pushes, counts=counts, then=then
        )
        return pack(message, everything)

    def ask(
        self,
        server: int,
        kind: type[WorkerMessage],
        payload: Payload = (),
        **what: Any,
    ) -> int:
        """Send a question; its number is what to wait for.

        Pushes that were left for its server go with it, if it has no frames of its own.
        """
        left: Left = []
        if not payload and issubclass(kind, Apply | Sum):
            with self._lock:
                left = self._left.pop(server, [])
        self.flush()
        request, frames = self._message(kind, payload, what, left)
        self._asked[request] = _Asked(server, frames, next(self._turns), time.monotonic())
        # Answers with frames come another way, where they keep their order with `Checked`.
        if not (issubclass(kind, Apply | Sum) and self._send_near(server, frames)):
            self._send(server, frames)
        return request

    def answer(self, request: int) -> tuple[Any, list[memoryview]]:
        """Wait for an answer; GroupLost if the group breaks before it comes."""
        while request not in self._answers:
            self._receive()
            if self.servers.is_lost():
                raise GroupLost("the generation is over")
            if self._refused:
                raise NotServed(f"A server refused: {self._refused}.")
            self._ask_again()
        message, payload = self._answers.pop(request)
        if isinstance(message, Refused):
            if message.is_stale:
                raise GroupLost(message.why)
            number = self._asked.pop(request).server
            raise NotServed(f"Server {number} refused: {message.why}.")
        return message, payload

    def _message(
        self, kind: type[WorkerMessage], payload: Payload, what: dict[str, Any], left: Left = ()
    ) -> tuple[int, list[bytes | memoryview]]:
        request = next(self._numbers)
        message = kind(generation=self.servers.generation, request=request, **what)
        if left:
            assert isinstance(message, Apply | Sum)
            return request, self._together(left, message)
        return request, pack(message, payload)

    def take_bytes(self) -> int:
        """How many have left since the last time."""
        self._told.clear()
        self._far.clear()
        taken, self.num_bytes = self.num_bytes, 0
        return taken

    def close(self) -> None:
        for passage in self._passages.values():
            passage.close()
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _send(self, server: int, frames: list[bytes | memoryview]) -> None:
        self.num_bytes += sum(len(frame) for frame in frames[1:])  # of tensors, as elsewhere
        socket = self._sockets[server]
        is_small = sum(map(len, frames)) < 65_536
        with self._lock:
            while True:
                try:
                    socket.send_multipart(frames, zmq.NOBLOCK, copy=is_small)
                    return
                except zmq.Again:  # it is gone, and much was sent to it
                    if not socket.poll(TICK_MS, zmq.POLLOUT) and self.servers.is_lost():
                        raise GroupLost("the generation is over") from None

    def _tell(self, server: int, frames: list[bytes | memoryview]) -> None:
        if not self._send_near(server, frames):
            self._far.add(server)
            self._send(server, frames)

    def _send_near(self, server: int, frames: list[bytes | memoryview]) -> bool:
        """Whether it went through a door. What is sent again goes the other way.

        So does what follows something that did in this step, or it would be there first.
        """
        with self._lock:
            passage = None if server in self._far else self._passages.get(server)
            return passage is not None and len(frames) == 1 and passage.send(frames[0])

    def _receive(self) -> None:
        with giving_way():  # to a server of this host that has others to answer
            ready = dict(self._poller.poll(TICK_MS))
        for server, passage in list(self._passages.items()):
            if passage.fileno() in ready:
                try:
                    message = passage.receive()
                except ConnectionError:  # whoever died will be announced
                    self._poller.unregister(passage)
                    self._passages.pop(server).close()
                else:
                    self._take([] if message is None else [message])
        for socket in self._sockets:
            if socket in ready:
                with self._lock:
                    frames = socket.recv_multipart(copy=False)
                self._take(frames)

    def _take(self, frames: Sequence[zmq.Frame | bytes]) -> None:
        try:
            message, payload = unpack(frames, _DECODER, MOST_BYTES)
        except BadFrame:
            return  # damaged on the way: it will be asked for again
        if isinstance(message, Checked):
            self._send_again(message)
            return
        if isinstance(message, Refused) and message.request in self._told:
            self._refused = "" if message.is_stale else message.why
        if message.request in self._asked:
            if not isinstance(message, Refused):
                del self._asked[message.request]
            self._answers[message.request] = message, payload
            self.num_received += sum(map(len, payload))

    def _send_question(self, request: int, server: int, frames: list[bytes | memoryview]) -> None:
        self._asked[request] = _Asked(server, frames, next(self._turns), time.monotonic())
        self._send(server, frames)

    def _ask_again(self) -> None:
        now = time.monotonic()
        for request, asked in self._asked.items():
            if now - asked.at > AGAIN_S and request not in self._answers:
                self._asked[request] = asked._replace(at=now)
                turn, generation = next(self._turns), self.servers.generation
                check = Check(generation=generation, request=request, turn=turn)
                self._send(asked.server, pack(check))

    def _send_again(self, checked: Checked) -> None:
        """A question was lost, or its answer; unless it was sent again since it was asked after."""
        asked = self._asked.get(checked.request)
        if asked is None or checked.request in self._answers or checked.turn < asked.sent:
            return
        self._send_question(checked.request, asked.server, asked.frames)


class Question(NamedTuple):
    server: int
    request: int
    kind: type[WorkerMessage]
    what: dict[str, Any]


class Questions:
    """What is asked of servers; rows that one misses are pushed again."""

    def __init__(self, line: Line, push: Callable[[int], None]):
        """`push` sends the rows of a key."""
        self._line, self._push = line, push

    def ask_all(self, kind: type[WorkerMessage], **what: Any) -> list[Question]:
        return [self.ask(server, kind, **what) for server in range(len(self._line))]

    def ask(self, server: int, kind: type[WorkerMessage], **what: Any) -> Question:
        return Question(server, self._line.ask(server, kind, **what), kind, what)

    def answers(self, questions: Sequence[Question]) -> list[tuple[Any, list[memoryview]]]:
        """In their order."""
        found = []
        for server, request, kind, what in questions:
            answer, frames = self._line.answer(request)
            while isinstance(answer, Missing):
                for key in answer.keys:
                    self._push(key)
                answer, frames = self._line.answer(self._line.ask(server, kind, **what))
            found.append((answer, frames))
        return found


def _num_bytes(left: Left) -> int:
    parts = (part for _, payload in left for part in payload)
    return sum(part.nbytes if isinstance(part, Tensor) else len(part) for part in parts)
