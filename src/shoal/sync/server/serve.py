"""The process of a parameter server, under a seat that comes after those of the ranks."""

import time
from collections.abc import Container, Iterator, Sequence

import msgspec
import zmq
from torch import Tensor

from shoal.comm.door import Door, Passage
from shoal.comm.reach import Reach
from shoal.comm.wire import BadFrame, listen, pack, unpack
from shoal.errors import UsageError
from shoal.faults import faultpoint
from shoal.sync.server.messages import Answer, Missing, Refused, Values, WorkerMessage
from shoal.sync.server.peers import Peers
from shoal.sync.server.reception import Reception

TICK_MS = 20
Heard = tuple[bytes, bytes]  # from whom, and what
SLACK_BYTES = 1 << 20  # for the head of a message
_DECODER: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


class Hall:
    """The workers that came through a server's door; each says first who it is."""

    def __init__(self, poller: zmq.Poller, directory: str):
        """Nobody comes if the directory cannot hold a socket here, on another host perhaps."""
        self.door, self._poller = _door_in(directory), poller
        self._passages: dict[int, Passage] = {}  # by descriptor
        self._names: dict[int, bytes] = {}
        self._by_name: dict[bytes, Passage] = {}
        if self.door is not None:
            poller.register(self.door, zmq.POLLIN)

    @property
    def name(self) -> str:
        return "" if self.door is None else self.door.name

    def hear(self, ready: Container[object], known: Container[bytes]) -> Iterator[Heard]:
        """What came from those who are `known`; others are shown out."""
        for fd, passage in list(self._passages.items()):
            if fd in ready:
                try:
                    message = passage.receive()
                except ConnectionError:
                    self._leave(fd)
                    continue
                if message is not None and fd in self._names:
                    yield self._names[fd], message
                elif message is not None and message in known:
                    self._names[fd], self._by_name[message] = message, passage
                elif message is not None:
                    self._leave(fd)
        while self.door is not None and self.door.fileno() in ready:
            came = self.door.open()
            if came is None:
                break
            self._passages[came.fileno()] = came
            self._poller.register(came, zmq.POLLIN)

    def send(self, name: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Whether an answer went this way."""
        passage = self._by_name.get(name)
        return passage is not None and len(frames) == 1 and passage.send(frames[0])

    def close(self) -> None:
        for fd in list(self._passages):
            self._leave(fd)
        if self.door is not None:
            self._poller.unregister(self.door)
            self.door.close()

    def _leave(self, fd: int) -> None:
        passage = self._passages.pop(fd)
        self._by_name.pop(self._names.pop(fd, b""), None)
        self._poller.unregister(passage)
        passage.close()


def _door_in(directory: str) -> Door | None:
    try:
        return Door(directory) if directory else None
    except (OSError, UsageError):
        return None


class Desk:
    """A server's socket. Call `turn` again and again.

    With `peers`, answers wait until others hold copies of what they may tell of.
    """

    def __init__(self, server: Reception, reach: Reach, peers: Peers | None = None):
        self.server, self.peers = server, peers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._most_bytes = server.most_bytes + SLACK_BYTES
        self._socket, self.address = listen(self._context, *reach.place, self._most_bytes)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        # Copies have an order of their own, in which workers are heard.
        self._hall = Hall(self._poller, "" if peers else reach.sockets)
        server.door = self._hall.name

    def turn(self) -> None:
        """Answer what came, or wait a moment."""
        if self.peers is None:
            ready = dict(self._poller.poll(TICK_MS))
            for sender, message in self._hall.hear(ready, self.server.guests):
                self._hear(sender, [message])
            came = self._socket in ready
        else:
            came = self.peers.turn(self._socket)
        while came and self._socket.poll(0):
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._hear(name.bytes, frames)
        for answer in self.server.tick(time.monotonic()):
            self._answer(answer)
        if self.peers is not None:
            for answer in self.peers.leader.release():
                faultpoint("server.copied", self.peers.leader.number - 1)
                self._send(answer)

    def _answer(self, answer: Answer) -> None:
        if self.peers is None:
            self._send(answer)
            return
        if not (answer.stays or self.server.in_place):  # it may change before it leaves
            own = [part.clone() if isinstance(part, Tensor) else part for part in answer.payload]
            answer = answer._replace(payload=own)
        self.peers.leader.hold(answer)

    def _hear(self, sender: bytes, frames: Sequence[zmq.Frame | bytes]) -> None:
        for answer in self._take_in(sender, frames):
            self._answer(answer)

    def _take_in(self, sender: bytes, frames: Sequence[zmq.Frame | bytes]) -> list[Answer]:
        try:
            message, payload = unpack(frames, _DECODER, self._most_bytes)
        except BadFrame as bad:  # its number is not to be trusted; who asked will ask again
            return [Answer(sender, Refused(request=0, why=str(bad)))]
        return self.server.take_in(sender, message, payload)

    def _send(self, answer: Answer) -> None:
        content = pack(answer.message, answer.payload)
        if isinstance(answer.message, Values | Missing) and self._hall.send(answer.to, content):
            return
        frames = [answer.to, *content]
        # In lockstep parameters change only when whoever asked for them has them, and pushes again.
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
        self._hall.close()
        self._socket.close(linger=0)
        self._context.term()
