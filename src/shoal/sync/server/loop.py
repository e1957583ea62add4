"""The loop of a server process: sockets to workers, and the messages between them and the core.

Workers of the same host may use a local socket (`comm/local_listener.py`) for small messages; all
others, and all large messages, use ZeroMQ. Read next: `core.py`, which handles the messages.
"""

import time
from collections.abc import Container, Iterator, Sequence

import msgspec
import zmq
from torch import Tensor

from shoal.comm.endpoint import Endpoint
from shoal.comm.local_listener import LocalConnection, LocalListener
from shoal.comm.wire import BadFrame, listen, pack, unpack
from shoal.errors import UsageError
from shoal.faults import faultpoint
from shoal.sync.server.core import ServerCore
from shoal.sync.server.messages import (
    MissingRows,
    PulledParameters,
    Reply,
    RequestRefused,
    WorkerMessage,
)
from shoal.sync.server.peers import Peers

TICK_MS = 20
Heard = tuple[bytes, bytes]  # from whom, and what
SLACK_BYTES = 1 << 20  # for the head of a message
_DECODER: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


class LocalWorkers:
    """Workers of this host on local sockets; each sends its identity first."""

    def __init__(self, poller: zmq.Poller, directory: str):
        """Without a listener if the directory cannot hold a socket here."""
        self.listener, self._poller = _open_listener(directory), poller
        self._connections: dict[int, LocalConnection] = {}  # by descriptor
        self._identities: dict[int, bytes] = {}
        self._by_identity: dict[bytes, LocalConnection] = {}
        if self.listener is not None:
            poller.register(self.listener, zmq.POLLIN)

    @property
    def name(self) -> str:
        return "" if self.listener is None else self.listener.name

    def hear(self, ready: Container[object], known: Container[bytes]) -> Iterator[Heard]:
        """What came from those who are `known`; others are disconnected."""
        for fd, connection in list(self._connections.items()):
            if fd in ready:
                try:
                    message = connection.receive()
                except ConnectionError:
                    self._close(fd)
                    continue
                if message is not None and fd in self._identities:
                    yield self._identities[fd], message
                elif message is not None and message in known:
                    self._identities[fd], self._by_identity[message] = message, connection
                elif message is not None:
                    self._close(fd)
        while self.listener is not None and self.listener.fileno() in ready:
            has_message = self.listener.accept()
            if has_message is None:
                break
            self._connections[has_message.fileno()] = has_message
            self._poller.register(has_message, zmq.POLLIN)

    def send(self, name: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Whether an answer went this way."""
        connection = self._by_identity.get(name)
        return connection is not None and len(frames) == 1 and connection.send(frames[0])

    def close(self) -> None:
        for fd in list(self._connections):
            self._close(fd)
        if self.listener is not None:
            self._poller.unregister(self.listener)
            self.listener.close()

    def _close(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._by_identity.pop(self._identities.pop(fd, b""), None)
        self._poller.unregister(connection)
        connection.close()


def _open_listener(directory: str) -> LocalListener | None:
    try:
        return LocalListener(directory) if directory else None
    except (OSError, UsageError):
        return None


class ServerLoop:
    """A server's socket. Call `run_once` again and again.

    With `peers`, answers wait until others hold copies of what they may tell of.
    """

    def __init__(self, server: ServerCore, reach: Endpoint, peers: Peers | None = None):
        self.server, self.peers = server, peers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._most_bytes = server.most_bytes + SLACK_BYTES
        self._socket, self.address = listen(self._context, *reach.place, self._most_bytes)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        # Copies have an order of their own, in which workers are heard.
        self._local_workers = LocalWorkers(self._poller, "" if peers else reach.sockets)
        server.listener = self._local_workers.name

    def run_once(self) -> None:
        """Answer what came, or wait a moment."""
        if self.peers is None:
            ready = dict(self._poller.poll(TICK_MS))
            for sender, message in self._local_workers.hear(ready, self.server.sessions):
                self._handle_one(sender, [message])
            has_message = self._socket in ready
        else:
            has_message = self.peers.poll(self._socket)
        while has_message and self._socket.poll(0):
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._handle_one(name.bytes, frames)
        for answer in self.server.tick(time.monotonic()):
            self._answer(answer)
        if self.peers is not None:
            for answer in self.peers.leader.release():
                faultpoint("server.copied", self.peers.leader.number - 1)
                self._send(answer)

    def _answer(self, answer: Reply) -> None:
        if self.peers is None:
            self._send(answer)
            return
        if not (answer.stays or self.server.in_place):  # it may change before it leaves
            own = [part.clone() if isinstance(part, Tensor) else part for part in answer.payload]
            answer = answer._replace(payload=own)
        self.peers.leader.hold(answer)

    def _handle_one(self, sender: bytes, frames: Sequence[zmq.Frame | bytes]) -> None:
        for answer in self._dispatch(sender, frames):
            self._answer(answer)

    def _dispatch(self, sender: bytes, frames: Sequence[zmq.Frame | bytes]) -> list[Reply]:
        try:
            message, payload = unpack(frames, _DECODER, self._most_bytes)
        except BadFrame as bad:  # its number is not to be trusted; who asked will ask again
            return [Reply(sender, RequestRefused(request=0, why=str(bad)))]
        return self.server.handle(sender, message, payload)

    def _send(self, answer: Reply) -> None:
        content = pack(answer.message, answer.payload)
        if isinstance(answer.message, PulledParameters | MissingRows) and self._local_workers.send(
            answer.to, content
        ):
            return
        frames = [answer.to, *content]
        # In lockstep parameters change only when the worker that asked has them, and pushes again.
        # Otherwise they may at any time, so a copy leaves, unless one was made.
        stays = answer.stays or self.server.in_place
        is_small = sum(map(len, frames)) < 65_536
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=is_small or not stays)
        except zmq.ZMQError:
            return  # it is gone, or does not read: it will ask again

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self._local_workers.close()
        self._socket.close(linger=0)
        self._context.term()
