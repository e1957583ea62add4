"""A server's sockets to the other servers: its records to its keepers, and the records it keeps.

They are apart from the workers', who are not heard before a successor has its predecessor's state.
A question is asked again when nobody answers in a while; records are sent again only if the answer
to such a question says that they did not come.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import zmq
from torch import Tensor

from shoal.comm.reach import Reach
from shoal.comm.wire import BadFrame, connect, listen, pack, unpack
from shoal.errors import ShoalError
from shoal.faults import faultpoint
from shoal.sync.server.clock import Clock
from shoal.sync.server.copies import (
    FromPeer,
    Have,
    Keeper,
    Leader,
    Send,
    Views,
    keepers_of,
    kept_by,
)
from shoal.sync.server.messages import Answer
from shoal.sync.server.records import Copied
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard

TICK_MS = 20
AGAIN_S = 2.0
STATES = 16  # a state may have so many times the bytes of the parameters, as in `layout.py`
SLACK_BYTES = 1 << 20  # for names and settings
_FROM_LEADER: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_FROM_KEEPER: msgspec.msgpack.Decoder[Have] = msgspec.msgpack.Decoder(Have)


def copied(
    server: Server,
    number: int,
    num_servers: int,
    copies: int,
    shard_of: Callable[[int], Shard],
    reach: Reach,
) -> "Peers | None":
    """Let a server write to its keepers, and keep what others write; None with one copy of all."""
    if copies == 1:
        return None
    leader: Leader[Answer] = Leader(
        number,
        keepers_of(number, num_servers, copies),
        lambda: _in_frames(*server.snapshot()),
        partial(_take_over, server),
    )
    kept = {}
    for owner in kept_by(number, num_servers, copies):
        copy = Copied(shard_of(owner), Clock(server.num_pieces, server.bound))
        kept[owner] = Keeper(copy.redo, copy.snapshot)
    peers = Peers(leader, kept, server, reach)
    server.journal = peers
    return peers


def _take_over(server: Server, frames: Views) -> None:
    server.redo(frames[0], frames[1:])
    server.begin(server.generation)


def _in_frames(header: bytes, tensors: Sequence[bytes | Tensor]) -> list[bytes | Tensor]:
    return [header, *tensors]


class Peers:
    """What a server sends of its own shard, and what it keeps of others', by their numbers.

    It is where the server writes down what it did, in the journal's stead.
    """

    is_long = False  # as a journal may be: a copy is always as long as the state

    def __init__(
        self,
        leader: Leader[Answer],
        kept: Mapping[int, Keeper],
        server: Server,
        reach: Reach,
    ):
        self.leader, self._kept, self._secret = leader, kept, server.secret
        self._in_lockstep = server.bound == 0
        # The same for all, so that who sends knows what will be taken.
        all_keys, tables = range(len(server.layout.keys)), server.held.tables
        self._most_bytes = server.layout.most_bytes(all_keys) + STATES * tables.num_bytes_of_all
        self._most_bytes += SLACK_BYTES
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = reach.keys
        self._door, self.address = listen(self._context, *reach.place, self._most_bytes)
        self._lines: dict[int, zmq.Socket[bytes]] = {}
        self._asked = 0.0

    def turn_to(self, generation: int, addresses: Sequence[str]) -> None:
        """Turn to the servers of a generation, which listen at these addresses."""
        self._close_lines()
        for keeper in self._kept.values():
            keeper.begin(generation)
        for number in self.leader.keepers:
            identity = f"{self.leader.server}.{generation}.{os.urandom(8).hex()}".encode()
            self._lines[number] = connect(self._context, addresses[number], identity, self._keys)
        self._asked = time.monotonic()
        self._send(self.leader.begin(generation))

    def turn(self, workers: zmq.Socket[bytes]) -> bool:
        """Hear the other servers, and wait a moment; whether a worker may be heard now."""
        poller = zmq.Poller()
        sockets = [self._door, *self._lines.values(), *([workers] if self.leader.is_ready else [])]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(TICK_MS))
        while self._door.poll(0):
            self._hear_leader()
        for number, line in self._lines.items():
            while line.poll(0):
                self._hear_keeper(number, line)
        if self.leader.is_waiting() and time.monotonic() - self._asked > AGAIN_S:
            self._asked = time.monotonic()
            self._send(self.leader.ask())
        return workers in ready

    def append(self, header: bytes, tensors: Sequence[bytes | Tensor]) -> None:
        """Send an update. In lockstep sums stand until it is answered, and it is not before."""
        if not self._in_lockstep:
            tensors = [t.clone() if isinstance(t, Tensor) else t for t in tensors]
        self._send(self.leader.write([header, *tensors], whole=False))

    def begin(self, header: bytes, tensors: Sequence[bytes | Tensor]) -> None:
        """Send the whole state, in the place of everything before it."""
        self._send(self.leader.write([header, *tensors], whole=True))

    def close(self) -> None:
        self._close_lines()
        self._door.close(linger=0)
        self._context.term()

    def _hear_leader(self) -> None:
        sender, *frames = self._door.recv_multipart(copy=False)
        try:
            message, payload = unpack(frames, _FROM_LEADER, self._most_bytes)
        except BadFrame:
            return  # damaged on the way: it will be asked for
        keeper = self._kept.get(message.server)
        if keeper is None or message.secret != self._secret:
            return  # a stranger on the port
        answer = keeper.take_in(message, payload)
        if answer is not None:
            faultpoint("server.keep", keeper.number - 1)
            _try([sender.bytes, *self._pack(*answer)], self._door)
            faultpoint("server.kept", keeper.number - 1)
            keeper.catch_up()

    def _hear_keeper(self, number: int, line: zmq.Socket[bytes]) -> None:
        try:
            have, payload = unpack(line.recv_multipart(copy=False), _FROM_KEEPER, self._most_bytes)
        except BadFrame:
            return
        self._send(self.leader.take_in(number, have, payload))

    def _send(self, sends: Sequence[Send]) -> None:
        for keeper, message, frames in sends:
            signed = msgspec.structs.replace(message, secret=self._secret)
            _try(self._pack(signed, frames), self._lines[keeper])

    def _pack(
        self, message: msgspec.Struct, frames: Sequence[bytes | Tensor]
    ) -> list[bytes | memoryview]:
        """What nobody would take is not sent again and again."""
        packed = pack(message, frames)
        num_bytes = sum(map(len, packed[1:]))
        if num_bytes > self._most_bytes:
            raise ShoalError(
                f"A server's copy has {num_bytes:,} bytes, and servers take {self._most_bytes:,} "
                f"from one another: {STATES} times the parameters. This optimizer keeps more. Use "
                "copies=1, or an optimizer with less state."
            )
        return packed

    def _close_lines(self) -> None:
        for line in self._lines.values():
            line.close(linger=0)
        self._lines = {}


def _try(frames: Sequence[bytes | memoryview], socket: zmq.Socket[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=sum(map(len, frames)) < 65_536)
    except zmq.ZMQError:
        return  # it is gone, or does not read: it will be asked
