"""Copies of a server's shard on other servers: who sends what to whom, and when an answer leaves.

With `copies=2` the shard of server i is also on server i + 1. Each record of what server i did
(`records.py`), an update with its sums or a whole state, goes to that *keeper*, which steps its
copy as server i did and so holds the same bits. Server i holds every answer back until its keepers
have all that went before: what a worker was told survives the death of either. A successor of
server i takes the state of the keeper that has most; a keeper that lacks more than was sent in this
generation is sent a snapshot.

Pure: `Leader` and `Keeper` are given what came and return what to send. They decide nothing by
time. What was sent before a question on the same connection came before it or not at all, so an
`Ask` whose answer tells of too little says what to send again.

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


def keepers_of(server: int, num_servers: int, copies: int) -> list[int]:
    """The servers that hold the shard of this one too."""
    return [(server + k) % num_servers for k in range(1, copies)]


def kept_by(server: int, num_servers: int, copies: int) -> list[int]:
    """The servers whose shards this one holds too."""
    return [(server - k) % num_servers for k in range(1, copies)]


class FromLeader(msgspec.Struct, frozen=True, tag_field="say", kw_only=True):
    generation: int
    server: int  # whose shard it is of
    secret: str = ""  # of the run


class Ask(FromLeader, frozen=True, tag="ask"):
    """What have you of my shard? If `wants`, all of it."""

    turn: int
    wants: bool = False


class Written(FromLeader, frozen=True, tag="written"):
    """What I did, in frames: the record that makes `number`, of the one before or, if `whole`, of
    any."""

    number: int
    whole: bool


class Have(msgspec.Struct, frozen=True, tag="have", kw_only=True):
    """I hold your shard after record `number`; in frames, if you want it. `turn` is the question's,
    or 0."""

    generation: int
    number: int
    turn: int = 0


FromPeer = Ask | Written


class Send(NamedTuple):
    """To a keeper."""

    keeper: int
    message: FromPeer
    frames: Frames = ()


class Leader(Generic[T]):
    """The side of a shard that answers workers. `snapshot` makes a record of the whole state, as
    frames; `restore` takes one over.

    `is_ready` is false until the state that a predecessor left is here, or is known not to exist:
    whoever is new begins with the first weights, which are record 0.
    """

    def __init__(
        self,
        server: int,
        keepers: Sequence[int],
        snapshot: Callable[[], Frames],
        restore: Callable[[Views], None],
    ):
        self.server, self.keepers, self.number, self.is_ready = server, keepers, 0, False
        self._snapshot, self._restore, self._turn = snapshot, restore, 0
        self.begin(-1)

    def begin(self, generation: int) -> list[Send]:
        """Ask keepers anew. What was held back is dropped: workers ask anew as well."""
        self.generation = generation
        self._have: dict[int, int] = {}  # the number that each keeper has
        self._sent: dict[int, Written] = {}  # that not all have, by number
        self._frames: dict[int, Frames] = {}
        self._held: deque[tuple[int, T]] = deque()
        return self.ask()

    def ask(self) -> list[Send]:
        """What to send when nobody has answered for a while."""
        self._turn += 1
        behind = [k for k in self.keepers if self._have.get(k, -1) < self.number]
        asked = behind if self.is_ready else self.keepers
        return [Send(keeper, self._question(False)) for keeper in asked]

    def write(self, frames: Frames, whole: bool) -> list[Send]:
        """A record was made: send it to the keepers that have all before it."""
        self.number += 1
        record = Written(
            generation=self.generation, server=self.server, number=self.number, whole=whole
        )
        self._sent[self.number], self._frames[self.number] = record, frames
        return [Send(keeper, record, frames) for keeper in self._have]

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

    def take_in(self, keeper: int, have: Have, frames: Views) -> list[Send]:
        if have.generation != self.generation:
            return []
        if not self.is_ready:
            return self._seek(keeper, have, frames)
        if have.turn != self._turn and keeper not in self._have:
            return []  # of a question that was asked again
        self._have[keeper] = max(self._have.get(keeper, -1), have.number)
        self._forget()
        return self._resend(keeper, have.number) if have.turn == self._turn else []

    def _seek(self, keeper: int, have: Have, frames: Views) -> list[Send]:
        """Find the state to begin with: that of the keeper that has most."""
        if frames:
            self._restore(frames)
            self.number, self.is_ready = have.number, True
            return self.begin(self.generation)
        self._have[keeper] = have.number
        if len(self._have) < len(self.keepers):
            return []
        best = max(self.keepers, key=self._have.__getitem__)
        if self._have[best]:
            return [Send(best, self._question(True))]
        self.is_ready = True
        return []

    def _resend(self, keeper: int, number: int) -> list[Send]:
        """What was sent before the question and did not come."""
        missing = range(number + 1, self.number + 1)
        if all(record in self._sent for record in missing):
            return [Send(keeper, self._sent[n], self._frames[n]) for n in missing]
        whole = Written(
            generation=self.generation, server=self.server, number=self.number, whole=True
        )
        return [Send(keeper, whole, self._snapshot())]

    def _safe(self) -> int:
        """The last record that all keepers have."""
        return min((self._have.get(keeper, -1) for keeper in self.keepers), default=self.number)

    def _forget(self) -> None:
        for number in [number for number in self._sent if number <= self._safe()]:
            del self._sent[number], self._frames[number]

    def _question(self, wants: bool) -> Ask:
        return Ask(generation=self.generation, server=self.server, turn=self._turn, wants=wants)


class Keeper:
    """The side of a shard that only keeps it. `redo` steps on a record, `snapshot` makes one."""

    def __init__(
        self,
        redo: Callable[[Views], None],
        snapshot: Callable[[], Frames],
    ):
        self.number, self.generation = 0, -1
        self._redo, self._snapshot = redo, snapshot
        self._waiting: deque[Views] = deque()

    def begin(self, generation: int) -> None:
        self.generation = generation

    def take_in(self, message: FromPeer, frames: Views) -> tuple[Have, Frames] | None:
        """What to answer, before `catch_up` is called; None to what is of another generation."""
        if message.generation != self.generation:
            return None
        if isinstance(message, Ask):
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

    def _have(self, turn: int) -> Have:
        return Have(generation=self.generation, number=self.number, turn=turn)
