"""A server's sockets to the other servers: records to its backups, and records it keeps as a
backup.

They are apart from the workers' sockets, which are not read before a successor has the state of its
predecessor. A request without a reply is sent again after a while; records are sent again only if
the reply to such a request shows that they were lost.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import zmq
from torch import Tensor

from shoal.comm.endpoint import Endpoint
from shoal.comm.wire import BadFrame, connect, listen, pack, unpack
from shoal.errors import ShoalError
from shoal.faults import faultpoint
from shoal.sync.server.clock import Clock
from shoal.sync.server.messages import Reply
from shoal.sync.server.records import ShardReplica
from shoal.sync.server.replication import (
    Backup,
    BackupStatus,
    FromPeer,
    Leader,
    PeerMessage,
    Views,
    backups_of,
    leaders_of,
)
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard

TICK_MS = 20
AGAIN_S = 2.0
STATES = 16  # a state may have so many times the bytes of the parameters, as in `layout.py`
SLACK_BYTES = 1 << 20  # for names and settings
_FROM_LEADER: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_FROM_BACKUP: msgspec.msgpack.Decoder[BackupStatus] = msgspec.msgpack.Decoder(BackupStatus)


def make_peers(
    server: Server,
    number: int,
    num_servers: int,
    copies: int,
    shard_of: Callable[[int], ServerShard],
    reach: Endpoint,
) -> "Peers | None":
    """Replicate a server to its backups, and back up others; None with one copy of all."""
    if copies == 1:
        return None
    leader: Leader[Reply] = Leader(
        number,
        backups_of(number, num_servers, copies),
        lambda: _record_frames(*server.snapshot()),
        partial(_restore, server),
    )
    backups = {}
    for owner in leaders_of(number, num_servers, copies):
        copy = ShardReplica(shard_of(owner), Clock(server.num_pieces, server.bound))
        backups[owner] = Backup(copy.redo, copy.snapshot)
    peers = Peers(leader, backups, server, reach)
    server.journal = peers
    return peers


def _restore(server: Server, frames: Views) -> None:
    server.redo(frames[0], frames[1:])
    server.begin(server.generation)


def _record_frames(header: bytes, tensors: Sequence[bytes | Tensor]) -> list[bytes | Tensor]:
    return [header, *tensors]


class Peers:
    """What a server sends of its own shard, and what it keeps of others', by their numbers.

    It is where the server writes down what it did, in the journal's stead.
    """

    is_long = False  # as a journal may be: a copy is always as long as the state

    def __init__(
        self, leader: Leader[Reply], backups: Mapping[int, Backup], server: Server, reach: Endpoint
    ):
        self.leader, self._backups, self._secret = leader, backups, server.secret
        self._in_lockstep = server.bound == 0
        # The same for all, so that who sends knows what will be taken.
        all_keys, tables = range(len(server.layout.keys)), server.parameters.tables
        self._most_bytes = server.layout.most_bytes(all_keys) + STATES * tables.num_bytes_of_all
        self._most_bytes += SLACK_BYTES
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = reach.keys
        self._listener, self.address = listen(self._context, *reach.place, self._most_bytes)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._asked = 0.0

    def start_generation(self, generation: int, addresses: Sequence[str]) -> None:
        """Turn to the servers of a generation, which listen at these addresses."""
        self._close_sockets()
        for backup in self._backups.values():
            backup.begin(generation)
        for number in self.leader.backups:
            identity = f"{self.leader.server}.{generation}.{os.urandom(8).hex()}".encode()
            self._sockets[number] = connect(self._context, addresses[number], identity, self._keys)
        self._asked = time.monotonic()
        self._send(self.leader.begin(generation))

    def poll(self, workers: zmq.Socket[bytes]) -> bool:
        """Hear the other servers, and wait a moment; whether a worker may be heard now."""
        poller = zmq.Poller()
        sockets = [
            self._listener,
            *self._sockets.values(),
            *([workers] if self.leader.is_ready else []),
        ]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(TICK_MS))
        while self._listener.poll(0):
            self._receive_record()
        for number, socket in self._sockets.items():
            while socket.poll(0):
                self._receive_status(number, socket)
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
        self._close_sockets()
        self._listener.close(linger=0)
        self._context.term()

    def _receive_record(self) -> None:
        sender, *frames = self._listener.recv_multipart(copy=False)
        try:
            message, payload = unpack(frames, _FROM_LEADER, self._most_bytes)
        except BadFrame:
            return  # damaged on the way: it will be asked for
        backup = self._backups.get(message.server)
        if backup is None or message.secret != self._secret:
            return  # a stranger on the port
        answer = backup.handle(message, payload)
        if answer is not None:
            faultpoint("server.keep", backup.number - 1)
            _send_if_possible([sender.bytes, *self._pack(*answer)], self._listener)
            faultpoint("server.kept", backup.number - 1)
            backup.catch_up()

    def _receive_status(self, number: int, socket: zmq.Socket[bytes]) -> None:
        try:
            have, payload = unpack(
                socket.recv_multipart(copy=False), _FROM_BACKUP, self._most_bytes
            )
        except BadFrame:
            return
        self._send(self.leader.handle(number, have, payload))

    def _send(self, sends: Sequence[PeerMessage]) -> None:
        for backup, message, frames in sends:
            signed = msgspec.structs.replace(message, secret=self._secret)
            _send_if_possible(self._pack(signed, frames), self._sockets[backup])

    def _pack(
        self, message: msgspec.Struct, frames: Sequence[bytes | Tensor]
    ) -> list[bytes | memoryview]:
        """Raise if a message is larger than peers accept, instead of sending it forever."""
        packed = pack(message, frames)
        num_bytes = sum(map(len, packed[1:]))
        if num_bytes > self._most_bytes:
            raise ShoalError(
                f"A server's copy has {num_bytes:,} bytes, and servers take {self._most_bytes:,} "
                f"from one another: {STATES} times the parameters. This optimizer keeps more. Use "
                "copies=1, or an optimizer with less state."
            )
        return packed

    def _close_sockets(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._sockets = {}


def _send_if_possible(frames: Sequence[bytes | memoryview], socket: zmq.Socket[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=sum(map(len, frames)) < 65_536)
    except zmq.ZMQError:
        return  # it is gone, or does not read: it will be asked
