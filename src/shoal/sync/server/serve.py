"""The process of a parameter server, under a seat that comes after those of the ranks."""

import time
from collections.abc import Sequence

import msgspec
import zmq
from torch import Tensor

from shoal.comm.reach import LOOPBACK, Reach
from shoal.comm.wire import BadFrame, listen, pack, unpack
from shoal.faults import faultpoint
from shoal.sync.server.messages import Answer, Refused, WorkerMessage
from shoal.sync.server.peers import Peers
from shoal.sync.server.reception import Reception

TICK_MS = 20
SLACK_BYTES = 1 << 20  # for the head of a message
_DECODER: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


class Desk:
    """A server's socket. Call `turn` again and again.

    With `peers`, answers wait until others hold copies of what they may tell of.
    """

    def __init__(self, server: Reception, peers: Peers | None = None, reach: Reach = LOOPBACK):
        self.server, self.peers = server, peers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._most_bytes = server.most_bytes + SLACK_BYTES
        self._socket, self.address = listen(self._context, *reach, self._most_bytes)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def turn(self) -> None:
        """Answer what came, or wait a moment."""
        if self.peers is None:
            came = bool(self._poller.poll(TICK_MS))
        else:
            came = self.peers.turn(self._socket)
        while came:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            for answer in self._take_in(sender.bytes, frames):
                self._answer(answer)
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

    def _take_in(self, sender: bytes, frames: Sequence[zmq.Frame]) -> list[Answer]:
        try:
            message, payload = unpack(frames, _DECODER, self._most_bytes)
        except BadFrame as bad:  # its number is not to be trusted; who asked will ask again
            return [Answer(sender, Refused(request=0, why=str(bad)))]
        return self.server.take_in(sender, message, payload)

    def _send(self, answer: Answer) -> None:
        frames = [answer.to, *pack(answer.message, answer.payload)]
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
        self._socket.close(linger=0)
        self._context.term()
