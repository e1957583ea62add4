"""Replication of a server's shard to other servers: which records to send, when a reply may leave.

With `copies=2` the shard of server i is also on server i + 1, its *backup*. Each record of server i
(`records.py`), an update with its sums or a whole state, goes to the backup, which steps its copy
as server i did and so holds the same bits. Server i, the *leader* of the shard, holds every reply
back until its backups have all records before it: what a worker was told survives the death of
either. A successor of server i loads the state of the backup with the most records; a backup that
lacks more than was sent in this generation gets a snapshot.

Pure: `Leader` and `Backup` take what came and return what to send. They decide nothing by time. A
connection keeps its order, so the reply to an `AskBackup` says which records were lost.

Cost: the bytes of a shard's gradients for each update and copy, and the memory of another shard.
Li et al. 2014, chain replication of parameter servers. Read next: `peers.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from torch import Tensor

T = TypeVar("T")
Frames = Sequence[bytes | Tensor]
Views = Sequence[memoryview]


def backups_of(server: int, num_servers: int, copies: int) -> list[int]:
    """The servers that hold the shard of this one too."""
    return [(server + k) % num_servers for k in range(1, copies)]


def leaders_of(server: int, num_servers: int, copies: int) -> list[int]:
    """The servers whose shards this one holds too."""
    return [(server - k) % num_servers for k in range(1, copies)]


class FromLeader(msgspec.Struct, frozen=True, tag_field="say", kw_only=True):
    generation: int
    server: int  # whose shard it is of
    secret: str = ""  # of the run


class AskBackup(FromLeader, frozen=True, tag="ask"):
    """What have you of my shard? If `wants`, all of it."""

    turn: int
    wants: bool = False


class ReplicatedRecord(FromLeader, frozen=True, tag="written"):
    """What I did, in frames: the record that makes `number`, of the one before or, if `whole`, of
    any."""

    number: int
    whole: bool


class BackupStatus(msgspec.Struct, frozen=True, tag="have", kw_only=True):
    """I hold your shard after record `number`; in frames, if you want it. `turn` is the question's,
    or 0."""

    generation: int
    number: int
    turn: int = 0


FromPeer = AskBackup | ReplicatedRecord


class PeerMessage(NamedTuple):
    """To a keeper."""

    backup: int
    message: FromPeer
    frames: Frames = ()


class Leader(Generic[T]):
    """The side of a shard that answers workers. `snapshot` makes a record of the whole state, as
    frames; `restore` takes one over.

    `is_ready` is false until the state that a predecessor left is here, or is known not to exist:
    a new server begins with the first weights, which are record 0.
    """

    def __init__(
        self,
        server: int,
        backups: Sequence[int],
        snapshot: Callable[[], Frames],
        restore: Callable[[Views], None],
    ):
        self.server, self.backups, self.number, self.is_ready = server, backups, 0, False
        self._snapshot, self._restore, self._turn = snapshot, restore, 0
        self.begin(-1)

    def begin(self, generation: int) -> list[PeerMessage]:
        """Ask backups again. Drop held replies: workers ask again as well."""
        self.generation = generation
        self._have: dict[int, int] = {}  # the number that each keeper has
        self._sent: dict[int, ReplicatedRecord] = {}  # that not all have, by number
        self._frames: dict[int, Frames] = {}
        self._held: deque[tuple[int, T]] = deque()
        return self.ask()

    def ask(self) -> list[PeerMessage]:
        """What to send when no backup has replied for a while."""
        self._turn += 1
        behind = [k for k in self.backups if self._have.get(k, -1) < self.number]
        asked = behind if self.is_ready else self.backups
        return [PeerMessage(backup, self._question(False)) for backup in asked]

    def write(self, frames: Frames, whole: bool) -> list[PeerMessage]:
        """A record was made: send it to the backups that have all before it."""
        self.number += 1
        record = ReplicatedRecord(
            generation=self.generation, server=self.server, number=self.number, whole=whole
        )
        self._sent[self.number], self._frames[self.number] = record, frames
        return [PeerMessage(backup, record, frames) for backup in self._have]

    def hold(self, answer: T) -> None:
        """Keep an answer until all that it may tell of has a copy; then `release` gives it."""
        self._held.append((self.number, answer))

    def release(self) -> Iterator[T]:
        """The answers that may leave, in order."""
        safe = self._safe()
        while self._held and self._held[0][0] <= safe:
            yield self._held.popleft()[1]

    def is_waiting(self) -> bool:
        """Whether a keeper owes an answer."""
        return not self.is_ready or self._safe() < self.number

    def handle(self, backup: int, have: BackupStatus, frames: Views) -> list[PeerMessage]:
        if have.generation != self.generation:
            return []
        if not self.is_ready:
            return self._seek(backup, have, frames)
        if have.turn != self._turn and backup not in self._have:
            return []  # of a question that was asked again
        self._have[backup] = max(self._have.get(backup, -1), have.number)
        self._forget()
        return self._resend(backup, have.number) if have.turn == self._turn else []

    def _seek(self, backup: int, have: BackupStatus, frames: Views) -> list[PeerMessage]:
        """Find the state to begin with: that of the keeper that has most."""
        if frames:
            self._restore(frames)
            self.number, self.is_ready = have.number, True
            return self.begin(self.generation)
        self._have[backup] = have.number
        if len(self._have) < len(self.backups):
            return []
        best = max(self.backups, key=self._have.__getitem__)
        if self._have[best]:
            return [PeerMessage(best, self._question(True))]
        self.is_ready = True
        return []

    def _resend(self, backup: int, number: int) -> list[PeerMessage]:
        """What was sent before the question and did not come."""
        missing = range(number + 1, self.number + 1)
        if all(record in self._sent for record in missing):
            return [PeerMessage(backup, self._sent[n], self._frames[n]) for n in missing]
        whole = ReplicatedRecord(
            generation=self.generation, server=self.server, number=self.number, whole=True
        )
        return [PeerMessage(backup, whole, self._snapshot())]

    def _safe(self) -> int:
        """The last record that all backups have."""
        return min((self._have.get(backup, -1) for backup in self.backups), default=self.number)

    def _forget(self) -> None:
        for number in [number for number in self._sent if number <= self._safe()]:
            del self._sent[number], self._frames[number]

    def _question(self, wants: bool) -> AskBackup:
        return AskBackup(
            generation=self.generation, server=self.server, turn=self._turn, wants=wants
        )


class Backup:
    """The side of a shard that only keeps it. `redo` steps on a record, `snapshot` makes one."""

    def __init__(self, redo: Callable[[Views], None], snapshot: Callable[[], Frames]):
        self.number, self.generation = 0, -1
        self._redo, self._snapshot = redo, snapshot
        self._waiting: deque[Views] = deque()

    def begin(self, generation: int) -> None:
        self.generation = generation

    def handle(self, message: FromPeer, frames: Views) -> tuple[BackupStatus, Frames] | None:
        """What to answer, before `catch_up` is called; None to what is of another generation."""
        if message.generation != self.generation:
            return None
        if isinstance(message, AskBackup):
            self.catch_up()
            whole = self._snapshot() if message.wants else ()
            return self._have(message.turn), whole
        fits = message.number > self.number and (message.whole or message.number == self.number + 1)
        if fits:  # else it came twice, or before one that was lost
            self.number = message.number
            self._waiting.append(frames)
        return self._have(0), ()

    def catch_up(self) -> None:
        """Step on what came. That it is here was said before: a copy need not be at once."""
        while self._waiting:
            self._redo(self._waiting.popleft())

    def _have(self, turn: int) -> BackupStatus:
        return BackupStatus(generation=self.generation, number=self.number, turn=turn)
