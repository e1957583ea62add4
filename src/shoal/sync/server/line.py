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

from shoal.comm.wire import BadFrame, connect, pack, unpack
from shoal.errors import GroupLost, ShoalError
from shoal.mesh import Servers
from shoal.sync.server.messages import (
    Check,
    Checked,
    Missing,
    Push,
    Pushes,
    Refused,
    ServerMessage,
    WorkerMessage,
)

TICK_MS = 50
AGAIN_S = 2.0
Payload = Sequence[bytes | Tensor]
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
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sockets)

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
        self._send(server, frames)

    def leave(self, server: int, payload: Payload = (), **what: Any) -> None:
        """Push at the next `flush`, or before the next question at the latest.

        Small pushes then take one message, which costs a server more than what is in it.
        """
        push = Push(generation=self.servers.generation, request=next(self._numbers), **what)
        with self._lock:
            self._told.add(push.request)
            self._left.setdefault(server, []).append((push, payload))

    def flush(self) -> None:
        """Send what was left."""
        with self._lock:
            left, self._left = self._left, {}
        for server, pairs in left.items():
            if len(pairs) == 1:
                self._send(server, pack(*pairs[0]))
                continue
            pushes, counts = [push for push, _ in pairs], [len(payload) for _, payload in pairs]
            everything = [part for _, payload in pairs for part in payload]
            self.tell(server, Pushes, everything, pushes=pushes, counts=counts)

    def ask(
        self,
        server: int,
        kind: type[WorkerMessage],
        payload: Payload = (),
        **what: Any,
    ) -> int:
        """Send a question; its number is what to wait for."""
        self.flush()
        request, frames = self._message(kind, payload, what)
        self._send_question(request, server, frames)
        return request

    def answer(self, request: int) -> tuple[Any, list[memoryview]]:
        """Wait for an answer; GroupLost if the group breaks before it comes."""
        while request not in self._answers:
            self._receive()
            if self.servers.is_lost():
                raise GroupLost("another generation was announced")
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
        self, kind: type[WorkerMessage], payload: Payload, what: dict[str, Any]
    ) -> tuple[int, list[bytes | memoryview]]:
        request = next(self._numbers)
        message = kind(generation=self.servers.generation, request=request, **what)
        return request, pack(message, payload)

    def take_bytes(self) -> int:
        """How many have left since the last time."""
        self._told.clear()
        taken, self.num_bytes = self.num_bytes, 0
        return taken

    def close(self) -> None:
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
                        raise GroupLost("another generation was announced") from None

    def _receive(self) -> None:
        for socket, _ in self._poller.poll(TICK_MS):
            with self._lock:
                frames = socket.recv_multipart(copy=False)
            try:
                message, payload = unpack(frames, _DECODER, MOST_BYTES)
            except BadFrame:
                continue  # damaged on the way: it will be asked for again
            if isinstance(message, Checked):
                self._send_again(message)
                continue
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
