"""A worker's client of its servers: requests out, replies in, matched by number.

A request without a reply for a while is followed by a `CheckRequest`, and sent again if that is
answered first, since a connection may have broken; servers do each request once. So a large message
that takes long is not sent twice. The client waits for a reply as long as the group is whole: a
worker that waits for a peer's gradients waits for the peer. Sending is safe from any thread,
waiting from one.
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

from shoal.comm.collectives import DEADLINE_S, took_too_long
from shoal.comm.flight_recorder import RECORDER
from shoal.comm.local_listener import LocalConnection, connect_local
from shoal.comm.mesh import Servers
from shoal.comm.wire import BadFrame, connect, pack, unpack
from shoal.errors import GroupLost, ShoalError
from shoal.sync.server.messages import (
    Apply,
    CheckRequest,
    MissingRows,
    Push,
    Pushes,
    RequestChecked,
    RequestRefused,
    ServerMessage,
    Sum,
    WorkerMessage,
)
from shoal.system.processes import batch_scheduling

TICK_MS = 50
AGAIN_S = 2.0
Payload = Sequence[bytes | Tensor]
QueuedPushes = Sequence[tuple[Push, Payload]]
MOST_BYTES = 1 << 40  # a worker trusts the servers it greeted

_DECODER: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


class NotServed(ShoalError):
    """A server refused what this worker asked."""


class _Unanswered(NamedTuple):
    """A question without an answer, last sent or asked after at some time."""

    server: int
    frames: list[bytes | memoryview]
    sent: int  # its turn
    at: float


class ServerClient:
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
        self._pending: dict[int, _Unanswered] = {}
        self._answers: dict[int, tuple[ServerMessage, list[memoryview]]] = {}
        self._queued: dict[int, list[tuple[Push, Payload]]] = {}  # not sent yet, by server
        self._unanswered: set[int] = set()  # requests without a reply, in this step
        self._refused = ""  # why some of that was
        self._connections: dict[int, LocalConnection] = {}  # by server of this host
        self._by_socket: set[int] = set()  # servers that a message went to by ZeroMQ in this step
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sockets)

    def connect_locally(self, listeners: Sequence[str]) -> None:
        """Send small messages to servers of this host over local sockets from now on."""
        for server, listener in enumerate(listeners):
            connection = connect_local(listener) if listener else None
            if connection is not None and connection.send(self._identity):
                self._connections[server] = connection
                self._poller.register(connection, zmq.POLLIN)

    def send(
        self, server: int, kind: type[WorkerMessage], payload: Payload = (), **what: Any
    ) -> None:
        """Send a message that has no reply."""
        request, frames = self._message(kind, payload, what)
        self._unanswered.add(request)
        self._send_unanswered(server, frames)

    def queue_push(self, server: int, payload: Payload = (), **what: Any) -> None:
        """Push at the next `flush`, or before the next question at the latest.

        Small pushes then take one message, which costs a server more than what is in it.
        """
        push = Push(generation=self.servers.generation, request=next(self._numbers), **what)
        with self._lock:
            self._unanswered.add(push.request)
            self._queued.setdefault(server, []).append((push, payload))

    def drop_queued(self) -> None:
        """Let go of what was left: it is of an attempt that was given up."""
        with self._lock:
            self._queued = {}

    def flush(self, least_bytes: int = 0) -> None:
        """Send what was left, to those servers for whom it is at least so much."""
        with self._lock:
            sizes = {server: _num_bytes(pairs) for server, pairs in self._queued.items()}
            much = [server for server, num_bytes in sizes.items() if num_bytes >= least_bytes]
            queued = {server: self._queued.pop(server) for server in much}
        for server, pairs in queued.items():
            frames = pack(*pairs[0]) if len(pairs) == 1 else self._pack_pushes(pairs)
            self._send_unanswered(server, frames)

    def _pack_pushes(
        self, pairs: QueuedPushes, then: Apply | Sum | None = None
    ) -> list[bytes | memoryview]:
        """Pushes in one message, and a question after them."""
        pushes, counts = [push for push, _ in pairs], [len(payload) for _, payload in pairs]
        everything = [part for _, payload in pairs for part in payload]
        request, generation = next(self._numbers), self.servers.generation
        self._unanswered.add(request)
        message = Pushes(
            generation=generation, request=request, pushes=pushes, counts=counts, then=then
        )
        return pack(message, everything)

    def ask(
        self, server: int, kind: type[WorkerMessage], payload: Payload = (), **what: Any
    ) -> int:
        """Send a question; its number is what to wait for.

        Pushes that were left for its server go with it, if it has no frames of its own.
        """
        queued: QueuedPushes = []
        if not payload and issubclass(kind, Apply | Sum):
            with self._lock:
                queued = self._queued.pop(server, [])
        self.flush()
        request, frames = self._message(kind, payload, what, queued)
        self._pending[request] = _Unanswered(server, frames, next(self._turns), time.monotonic())
        # Answers with frames come another way, where they keep their order with `RequestChecked`.
        if not (issubclass(kind, Apply | Sum) and self._send_locally(server, frames)):
            self._send(server, frames)
        return request

    def answer(self, request: int) -> tuple[Any, list[memoryview]]:
        """Wait for an answer; GroupLost if the group breaks before it comes."""
        record, deadline = None, time.monotonic() + DEADLINE_S
        if request not in self._answers:
            number = self._pending[request].server
            record = RECORDER.begin(f"request to server {number}", f"server:{number}", (), 0)
        while request not in self._answers:
            with RECORDER.blocked:
                self._receive()
            if self.servers.is_lost():
                raise GroupLost("the generation is over")
            if self._refused:
                raise NotServed(f"A server refused: {self._refused}.")
            self._check_pending()
            if record is not None and time.monotonic() > deadline:
                raise took_too_long([record], f"server {number} waits for another rank, or is gone")
        if record is not None:
            record.end()
        message, payload = self._answers.pop(request)
        if isinstance(message, RequestRefused):
            if message.is_stale:
                raise GroupLost(message.why)
            number = self._pending.pop(request).server
            raise NotServed(f"Server {number} refused: {message.why}.")
        return message, payload

    def _message(
        self,
        kind: type[WorkerMessage],
        payload: Payload,
        what: dict[str, Any],
        queued: QueuedPushes = (),
    ) -> tuple[int, list[bytes | memoryview]]:
        request = next(self._numbers)
        message = kind(generation=self.servers.generation, request=request, **what)
        if queued:
            assert isinstance(message, Apply | Sum)
            return request, self._pack_pushes(queued, message)
        return request, pack(message, payload)

    def take_bytes(self) -> int:
        """How many have left since the last time."""
        self._unanswered.clear()
        self._by_socket.clear()
        taken, self.num_bytes = self.num_bytes, 0
        return taken

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
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

    def _send_unanswered(self, server: int, frames: list[bytes | memoryview]) -> None:
        if not self._send_locally(server, frames):
            self._by_socket.add(server)
            self._send(server, frames)

    def _send_locally(self, server: int, frames: list[bytes | memoryview]) -> bool:
        """Whether it went over the local socket. What is sent again goes the other way.

        So does what follows something that did in this step, or it would be there first.
        """
        with self._lock:
            connection = None if server in self._by_socket else self._connections.get(server)
            return connection is not None and len(frames) == 1 and connection.send(frames[0])

    def _receive(self) -> None:
        with batch_scheduling():  # to a server of this host that has others to answer
            ready = dict(self._poller.poll(TICK_MS))
        for server, connection in list(self._connections.items()):
            if connection.fileno() in ready:
                try:
                    message = connection.receive()
                except ConnectionError:  # the supervisor announces deaths
                    self._poller.unregister(connection)
                    self._connections.pop(server).close()
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
        if isinstance(message, RequestChecked):
            self._resend(message)
            return
        if isinstance(message, RequestRefused) and message.request in self._unanswered:
            self._refused = "" if message.is_stale else message.why
        if message.request in self._pending:
            if not isinstance(message, RequestRefused):
                del self._pending[message.request]
            self._answers[message.request] = message, payload
            self.num_received += sum(map(len, payload))

    def _send_request(self, request: int, server: int, frames: list[bytes | memoryview]) -> None:
        self._pending[request] = _Unanswered(server, frames, next(self._turns), time.monotonic())
        self._send(server, frames)

    def _check_pending(self) -> None:
        now = time.monotonic()
        for request, asked in self._pending.items():
            if now - asked.at > AGAIN_S and request not in self._answers:
                self._pending[request] = asked._replace(at=now)
                turn, generation = next(self._turns), self.servers.generation
                check = CheckRequest(generation=generation, request=request, turn=turn)
                self._send(asked.server, pack(check))

    def _resend(self, checked: RequestChecked) -> None:
        """A question was lost, or its answer; unless it was sent again since it was asked after."""
        asked = self._pending.get(checked.request)
        if asked is None or checked.request in self._answers or checked.turn < asked.sent:
            return
        self._send_request(checked.request, asked.server, asked.frames)


class SentRequest(NamedTuple):
    server: int
    request: int
    kind: type[WorkerMessage]
    what: dict[str, Any]


class RequestSender:
    """What is asked of servers; rows that one misses are pushed again."""

    def __init__(self, line: ServerClient, push: Callable[[int], None]):
        """`push` sends the rows of a key."""
        self._line, self._push = line, push

    def ask_all(self, kind: type[WorkerMessage], **what: Any) -> list[SentRequest]:
        return [self.ask(server, kind, **what) for server in range(len(self._line))]

    def ask(self, server: int, kind: type[WorkerMessage], **what: Any) -> SentRequest:
        return SentRequest(server, self._line.ask(server, kind, **what), kind, what)

    def answers(self, requests: Sequence[SentRequest]) -> list[tuple[Any, list[memoryview]]]:
        """In their order."""
        found = []
        for server, request, kind, what in requests:
            answer, frames = self._line.answer(request)
            while isinstance(answer, MissingRows):
                for key in answer.keys:
                    self._push(key)
                answer, frames = self._line.answer(self._line.ask(server, kind, **what))
            found.append((answer, frames))
        return found


def _num_bytes(queued: QueuedPushes) -> int:
    parts = (part for _, payload in queued for part in payload)
    return sum(part.nbytes if isinstance(part, Tensor) else len(part) for part in parts)
