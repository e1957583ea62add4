"""Messages between the first host of a run and the agents of the others: each once, and in order.

ZeroMQ reconnects after a failure, but loses what was on its way. So packets are numbered, each
acknowledges the packets received from the other side, and those that are not acknowledged are
sent again after a while. `HostChannel` is one side and pure: its caller sends the packets and
gives the time. Cost: a packet without content every 0.2 s. Read next: `hosts.py`, `host_agent.py`.
"""

from collections import deque
from typing import Any

import msgspec

from shoal.cluster.bundle import BundledFile
from shoal.system.fork_server import SignalWorker, SpawnWorker, WorkerExited, WorkerStarted
from shoal.training.options import StartOptions

BEAT_S = 0.2  # between heartbeats
RESEND_S = 1.0  # after which a packet that was not acknowledged is sent again
MOST_BYTES = 4 << 20  # of a packet
PROOF = ".hosts"  # a file in the run directory by which a host knows that it sees it


class JoinRequest(msgspec.Struct, frozen=True, tag="join"):
    """I want to join; `versions` are of what all hosts need alike."""

    name: str
    address: str
    cores: int
    versions: dict[str, str]


class NeedFiles(msgspec.Struct, frozen=True, tag="need"):
    """Send the files that travel, from this byte on."""

    start: int


class HostPrepared(msgspec.Struct, frozen=True, tag="prepared"):
    """I can start members. `facts` is what my preparation found, to be compared."""

    facts: dict[str, Any]
    sees_run_dir: bool
    sees_checkpoints: bool


class HostFailed(msgspec.Struct, frozen=True, tag="host-failed"):
    """I could not prepare, and leave."""

    why: str


class HostLog(msgspec.Struct, frozen=True, tag="log"):
    """The end of a log that the first host does not see."""

    name: str
    content: bytes


class MembersGone(msgspec.Struct, frozen=True, tag="gone"):
    """I have no members any more, and start no others."""

    how: str


class JoinAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """You are this host. If I am silent for longer than `timeout_s`, end your members, and try to
    join again for `rejoin_s`."""

    host: int
    timeout_s: float
    rejoin_s: float


class JoinRefused(msgspec.Struct, frozen=True, tag="refused"):
    why: str


class PrepareHost(msgspec.Struct, frozen=True, tag="prepare"):
    """Prepare this run. Paths are absolute, and the first host's."""

    recipe: str  # its name in records
    spec: str  # by which it is found in the directory
    settings: dict[str, str]
    options: StartOptions
    directory: str
    run_dir: str
    proof: str  # what the file PROOF in the run directory holds, and the draft in the checkpoints'
    needs_run_dir: bool
    needs_checkpoints: bool
    files: tuple[BundledFile, ...]


class FilePart(msgspec.Struct, frozen=True, tag="part"):
    start: int
    content: bytes


class SeatsTaken(msgspec.Struct, frozen=True, tag="seats"):
    """The run begins, with these on your host."""

    seats: str


class EndMembers(msgspec.Struct, frozen=True, tag="end"):
    """End your members, send their logs if I do not see them, and report it with `MembersGone`."""


class JoinAgain(msgspec.Struct, frozen=True, tag="again"):
    """You are no host any more: end your members, and ask to join again, as a new one."""


class RunEnded(msgspec.Struct, frozen=True, tag="run-ended"):
    """The run is over."""

    exit_code: int
    how: str


FromHost = (
    JoinRequest
    | NeedFiles
    | HostPrepared
    | HostFailed
    | HostLog
    | MembersGone
    | WorkerStarted
    | WorkerExited
)
ToHost = (
    JoinAccepted
    | JoinRefused
    | PrepareHost
    | FilePart
    | SeatsTaken
    | SpawnWorker
    | SignalWorker
    | EndMembers
    | JoinAgain
    | RunEnded
)

encode = msgspec.msgpack.Encoder().encode
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
TO_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)


class Packet(msgspec.Struct, frozen=True, array_like=True):
    number: int  # from 1 on; 0 is a heartbeat without content
    num_received: int  # from the other side
    content: bytes = b""


PACKET: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


class HostChannel:
    """One side's packets: numbered, acknowledged, and sent again until they are."""

    def __init__(self, now: float):
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._num_sent = self._num_received = 0
        self._heard_at = self._sent_at = now
        self._waits_since = now  # for the first of `_unacknowledged`

    def wrap(self, content: bytes, now: float) -> Packet:
        """A packet with this content, to send now."""
        self._num_sent += 1
        if not self._unacknowledged:
            self._waits_since = now
        self._unacknowledged.append((self._num_sent, content))
        self._sent_at = now
        return Packet(self._num_sent, self._num_received, content)

    def due(self, now: float) -> list[Packet]:
        """The packets to send by now: unacknowledged ones again, or a heartbeat."""
        if self._unacknowledged and now - self._waits_since > RESEND_S:
            self._waits_since = self._sent_at = now
            return [
                Packet(number, self._num_received, content)
                for number, content in self._unacknowledged
            ]
        if now - self._sent_at > BEAT_S:
            self._sent_at = now
            return [self.heartbeat()]
        return []

    def heartbeat(self) -> Packet:
        """A packet that only acknowledges."""
        return Packet(0, self._num_received)

    def receive(self, packet: Packet, now: float) -> bytes | None:
        """The content of a packet if it is the next one; None if it is early, or a repetition."""
        self._heard_at = now
        while self._unacknowledged and self._unacknowledged[0][0] <= packet.num_received:
            self._unacknowledged.popleft()
            self._waits_since = now
        if packet.number != self._num_received + 1:
            return None
        self._num_received += 1
        return packet.content

    def silent_s(self, now: float) -> float:
        """Seconds since the last packet of the other side."""
        return now - self._heard_at

    @property
    def is_acknowledged(self) -> bool:
        """Whether the other side has received all packets."""
        return not self._unacknowledged
