"""What a server is to workers: it greets them, keeps their rows, and answers when it may.

It decides nothing by time. What it does with a message follows from the clock (`clock.py`): pieces
of a batch are applied once, whoever sends them and how often; a worker is given parameters when the
bound lets it begin. What becomes of the rows is for whoever is a `Reception`: a parameter server
steps on their sums (`server.py`), a host's own server passes them on (`host.py`).

It has no socket: `take_in` is given a message and says what to answer. `serve.py` runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

import msgspec
from torch import Tensor

from shoal.comm.shared_memory import Place, Segment
from shoal.comm.wire import BadFrame
from shoal.data.split import shares
from shoal.faults import faultpoint
from shoal.logs import warn_on_screen
from shoal.sync.server.clock import Clock, lag_in_words
from shoal.sync.server.dumping import Dumping
from shoal.sync.server.guests import Guest, guest_of
from shoal.sync.server.layout import Layout
from shoal.sync.server.messages import (
    Answer,
    Apply,
    Check,
    Checked,
    Done,
    Dump,
    Fetch,
    Found,
    Halt,
    Hello,
    Join,
    Load,
    Look,
    Missing,
    Part,
    Pull,
    Push,
    Pushes,
    Refused,
    Stop,
    Sum,
    Summed,
    Values,
    Welcome,
    WorkerMessage,
)
from shoal.sync.server.records import Told
from shoal.sync.server.rows import Rows
from shoal.sync.server.sets import ValueSets
from shoal.sync.server.sharing import share
from shoal.sync.server.tables import Tables
from shoal.sync.state import State
from shoal.sync.stretches import STRETCH_BYTES

Waiting = Sum | Apply | Join | Pull
Views = Sequence[memoryview]


class Held(Protocol):
    """The parameters that workers see here."""

    layout: Layout
    keys: list[int]
    tables: Tables
    sets: ValueSets

    @property
    def values(self) -> dict[int, Tensor]: ...


class Reception(ABC):
    def __init__(
        self,
        held: Held,
        *,
        num_seats: int,
        num_pieces: int,
        bound: int | None,
        secret: str,
        rule: str = "mean",
    ):
        self.held, self.layout = held, held.layout
        self.num_seats, self.num_pieces, self.bound, self._rule = num_seats, num_pieces, bound, rule
        self.clock = Clock(num_pieces, bound)
        self.secret, self._digest = secret, held.layout.digest
        self._order = held.layout.in_order(held.keys)
        self._num_parameters = {key: len(held.layout.segments(key)) for key in held.keys}
        self._begun, self._halt = 0, None  # type: int, Halt | None
        self.version = 0  # updates made, and states taken over from workers
        self._told: dict[int, Told] = {}  # the last, by first piece
        self.door = ""  # through which workers of the host come, if they may
        self._slabs: list[Segment | None] = []
        if self.in_place:
            held.sets.double()
            self._slabs = share(held.tables.slabs)

    @property
    def in_place(self) -> bool:
        """Whether workers read parameters where they stand: they change when all have read."""
        return self.bound == 0

    def tick(self, now: float) -> list[Answer]:
        """What there is to say because time has passed."""
        return []

    @abstractmethod
    def _refuse_apply(self, apply: Apply) -> None:
        """ValueError if nobody can step like that."""

    @abstractmethod
    def _apply(self, guest: Guest, apply: Apply, pieces: range) -> None:
        """Step on some pieces, all of which are here and none is applied."""

    @abstractmethod
    def _look_at_sums(self, sum_: Sum, pieces: range) -> Told:
        """What is to be said of the sums of some pieces, all of which are here."""

    @abstractmethod
    def _dump(self, dump: Dump) -> State: ...
    @abstractmethod
    def _load(self, load: Load, payload: Sequence[memoryview]) -> None:
        """Go on from a state."""

    def begin(self, generation: int, num_seats: int | None = None) -> None:
        """Workers greet anew; what they pushed and did not apply, they push again."""
        self.generation, self._halt = generation, None  # workers say which halt holds still
        self.num_seats = num_seats or self.num_seats
        self.guests: dict[bytes, Guest] = {}
        self._dumping = Dumping()
        own = shares(self.num_pieces, self.num_seats)
        keys = [*self.held.keys, *self.held.tables.keys]
        self._rows = Rows(keys, self.num_pieces, self.in_place, self._rule, own)
        for first, told in self._told.items():
            self._told[first] = msgspec.structs.replace(told, attempt=-1)
        # A worker waits for one answer of a kind at most.
        self._waiting: dict[tuple[bytes, type[Waiting]], Waiting] = {}

    def take_in(
        self, sender: bytes, message: WorkerMessage, payload: Sequence[memoryview]
    ) -> list[Answer]:
        """Do what a message asks for. Whatever is wrong with it is said to its sender alone."""
        try:
            return [*self._hear(sender, message, payload), *self._serve_waiting()]
        except (BadFrame, ValueError) as error:
            return [Answer(sender, Refused(request=message.request, why=str(error)))]

    def _hear(self, sender: bytes, message: WorkerMessage, payload: Views) -> list[Answer]:
        if message.generation != self.generation:
            why = f"this is generation {self.generation}, not {message.generation}"
            return [Answer(sender, Refused(request=message.request, why=why, is_stale=True))]
        if isinstance(message, Check):
            return [Answer(sender, Checked(request=message.request, turn=message.turn))]
        if isinstance(message, Pushes):
            return list(self._hear_all(sender, message, payload))
        return list(self._take_in(sender, message, payload))

    def _hear_all(self, sender: bytes, message: Pushes, payload: Views) -> Iterator[Answer]:
        if len(message.counts) != len(message.pushes) or sum(message.counts) != len(payload):
            raise BadFrame(f"{len(message.pushes)} pushes came with {len(payload)} frames")
        frames = iter(payload)
        own = [list(islice(frames, max(0, count))) for count in message.counts]
        for push, views in zip(message.pushes, own, strict=True):
            try:
                yield from self._hear(sender, push, views)
            except (BadFrame, ValueError) as error:
                yield Answer(sender, Refused(request=push.request, why=str(error)))
        if message.then is not None:
            yield from self.take_in(sender, message.then, ())

    def _take_in(self, sender: bytes, message: WorkerMessage, payload: Views) -> Iterator[Answer]:
        if isinstance(message, Hello):
            yield Answer(sender, self._greet(sender, message))
            return
        guest = self.guests.get(sender)
        if guest is None:
            raise ValueError("who are you? Greet first")
        match message:
            case Push():
                self._keep(guest, message, payload)
            case Sum() if not self.clock.is_new(message.batch, self._pieces(guest, message)):
                yield self._summed_before(sender, message)
            case Sum() if told := self._told_of(message):
                # Whoever was told first may have begun another attempt.
                yield _summed(sender, message, told)
            case Sum() | Apply() if missing := self._missing(guest, message):
                # What a worker pushed came before what it asks, or will not come.
                yield Answer(sender, Missing(request=message.request, keys=missing))
            case Sum() | Apply() | Pull():
                self._refuse_early(guest, message.batch)
                if isinstance(message, Apply):
                    self._refuse_apply(message)
                self._wait(sender, message)
            case Fetch():
                part = Part(request=message.request)
                yield Answer(sender, part, guest.fetched(message), stays=True)
            case Look():
                rows = self._look_up(guest, message, payload)
                yield Answer(sender, Found(request=message.request), [rows])
            case Stop():
                if self._halt is None or self._halt.step <= self.clock.committed:
                    self._halt = Halt(self._begun + 2, message.for_good)
                    own = shares(self.num_pieces, self.num_seats)
                    if lag := lag_in_words(self.clock, self._begun, own, message.for_good):
                        warn_on_screen(lag)
                yield Answer(sender, Done(request=message.request))
            case Dump():
                yield self._dumping.answer(sender, message, self._dump)
            case Load():
                if message.request > guest.loaded:  # or else it came twice
                    self._load(message, payload)
                    guest.loaded = message.request
                yield Answer(sender, Done(request=message.request))

    def _greet(self, sender: bytes, hello: Hello) -> Welcome:
        if hello.secret != self.secret:
            raise ValueError("the key is another run's")
        if hello.layout != self._digest:
            raise ValueError("your parameters are laid out differently; is it the same recipe?")
        guest = self.guests.get(sender)  # it came twice
        if guest is None:
            guest = guest_of(hello, self.layout, self.num_seats, self.num_pieces, self.bound == 0)
            self.guests[sender] = guest
        if hello.version > self.version:
            raise ValueError(
                "it took the place of one that died, and what that did is lost: go on from the "
                "newest checkpoint, with the same command and --resume"
            )
        # What a successor would not know, nor a newcomer.
        self._begun = max(self._begun, hello.batch, self.clock.next_of(lambda _: guest.pieces))
        if self._halt is None or (hello.halt is not None and hello.halt.step > self._halt.step):
            self._halt = hello.halt
        return Welcome(
            request=hello.request,
            is_shared=guest.rows is not None,
            values=self._shown() if guest.rows is not None else [],
            tables=[s.place if s is not None else None for s in self._slabs if guest.rows],
            door=self.door if guest.rows is not None else "",
            committed=self.clock.committed,
            next_batch=self.clock.next_of(lambda _: guest.pieces),
        )

    def _shown(self) -> list[Place]:
        """Where parameters stand that workers read; out of lockstep they may change under them."""
        return self.held.sets.places if self.in_place else []

    def _refuse_early(self, guest: Guest, batch: int) -> None:
        """A worker comes to a batch by its own pieces of the one before.

        One that is further than that was here with a server whose journal is lost.
        """
        if batch < 0:
            raise ValueError(f"there is no batch {batch}")
        if batch > self.clock.committed and self.clock.is_new(batch - 1, guest.pieces):
            raise ValueError(
                f"it was asked for batch {batch}, and of batch {batch - 1} it has nothing. If it "
                "took the place of one that died, what that did is lost: go on from the newest "
                "checkpoint, with the same command and --resume"
            )

    def _keep(self, guest: Guest, push: Push, payload: Sequence[memoryview]) -> None:
        """Put rows away until they are applied; what was applied before is left."""
        is_table, batch = push.key in self.held.tables.keys, push.batch
        if push.key not in self.held.values and not is_table:
            raise ValueError(f"key {push.key} is not held here")
        if len(push.touched) != (1 if is_table else self._num_parameters[push.key]):
            raise ValueError(f"a push of key {push.key} tells of {len(push.touched)} parameters")
        if push.blocks != guest.blocks or push.attempt < 0:
            raise ValueError(f"a push of key {push.key} is not of the pieces of its worker")
        if not self.clock.is_new(batch, guest.pieces):
            return
        self._refuse_early(guest, batch)
        if not self.clock.may_begin(batch):
            raise ValueError(f"batch {batch} may not be begun yet")
        faultpoint("server.push", batch)
        if is_table:
            if push.lent is not None:
                payload = guest.lent.frames(push.lent, self.most_bytes)
            found = self.held.tables.rows_of(push.key, payload)
        else:
            found = guest.rows_of(push, self.held.values[push.key], payload)
        rows = dict(zip(push.blocks, found, strict=True))
        is_whole = self._rows.keep(batch, push.attempt, push.key, rows, push.touched)
        if is_whole and not is_table:
            self.held.sets.copy_ahead()

    def _look_up(self, guest: Guest, look: Look, payload: Sequence[memoryview]) -> Tensor:
        """Rows as of a batch: in lockstep also of one that some servers have stepped on already,
        since after a death it may be computed again."""
        self._refuse_early(guest, look.batch)
        ahead = self.clock.committed - look.batch if self.bound == 0 else 0
        if ahead not in (0, 1):
            raise ValueError(f"rows of batch {look.batch} were asked for in {self.clock.committed}")
        return self.held.tables.look_up(look.table, payload, ahead == 1)

    @cached_property
    def most_bytes(self) -> int:
        """That one message may hold: the rows of a key, or a stretch of a state, with names."""
        keys = [self.layout.keys[key].num_bytes for key in self.held.keys]
        rows = max([*keys, self.held.tables.num_bytes]) * self.num_pieces
        return max(rows, self.layout.most_bytes(self.held.keys) + 2 * STRETCH_BYTES)

    def _pieces(self, guest: Guest, message: Sum | Apply) -> range:
        """Those that are stepped on together: all in lockstep, else a worker's own."""
        pieces = range(self.num_pieces) if self.bound == 0 else guest.pieces
        if (message.first, message.last) != (pieces.start, pieces.stop):
            raise ValueError(
                f"pieces {message.first} to {message.last} were meant, and {pieces.start} to "
                f"{pieces.stop} are stepped on together"
            )
        return pieces

    def _missing(self, guest: Guest, message: Sum | Apply) -> list[int]:
        """The keys of which a worker's rows are not here, of a batch that may have been begun."""
        self._refuse_early(guest, message.batch)
        if not self.clock.is_new(message.batch, self._pieces(guest, message)):
            return []
        return self._rows.missing(message.batch, guest.pieces, message.attempt)

    def _wait(self, sender: bytes, message: Waiting) -> None:
        """Answer it when that can be done."""
        waits = self._waiting.get((sender, type(message)), message)
        if message.request >= waits.request:  # or else it is late, and nobody waits for it
            self._waiting[sender, type(message)] = message

    def _serve_waiting(self) -> Iterator[Answer]:
        for (sender, _), message in self._waiting.items():
            if isinstance(message, Apply):
                self._step_if_whole(self.guests[sender], message)
        for (sender, kind), message in list(self._waiting.items()):
            answer = self._answer_waiting(sender, message)
            if answer is not None:
                del self._waiting[sender, kind]
                yield answer

    def _answer_waiting(self, sender: bytes, message: Waiting) -> Answer | None:
        if isinstance(message, Sum):
            return self._summed(sender, message)
        assert isinstance(message, Pull | Apply)
        return self._values(sender, message, message.batch + isinstance(message, Apply))

    def _step_if_whole(self, guest: Guest, apply: Apply) -> None:
        pieces = self._pieces(guest, apply)
        if self.clock.is_new(apply.batch, pieces) and self._is_whole(apply, pieces):
            self._apply(guest, apply, pieces)

    def _is_whole(self, apply: Apply, pieces: range) -> bool:
        """Whether all rows are here that are to be stepped on."""
        return self._rows.are_whole(apply.batch, pieces, apply.attempt)

    def _values(self, sender: bytes, pull: Pull | Apply, batch: int) -> Answer | None:
        """The parameters for a batch, if it may be begun."""
        is_due = self.clock.committed >= batch if pull.meets else self.clock.may_begin(batch)
        if not is_due and (isinstance(pull, Apply) or pull.waits):
            return None
        faultpoint("server.pull", batch)
        guest = self.guests[sender]
        self._begun = max(self._begun, batch)
        guest.give(pull.request, self.held.values, self.version, self.in_place)
        values = Values(
            request=pull.request,
            committed=self.clock.committed,
            version=guest.version,
            number=self.held.sets.now,
            halt=self._halt,
            made=guest.made,
        )
        return Answer(sender, values, guest.first_few(self._order), stays=True)

    def _summed_before(self, sender: bytes, sum_: Sum) -> Answer:
        """They were applied before the answer came through."""
        told = self._told.get(sum_.first)
        if told is None or told.batch != sum_.batch:
            raise ValueError(f"batch {sum_.batch} is over")
        return _summed(sender, sum_, told)

    def _told_of(self, sum_: Sum) -> Told | None:
        told = self._told.get(sum_.first)
        return told if told and (told.batch, told.attempt) == (sum_.batch, sum_.attempt) else None

    def _summed(self, sender: bytes, sum_: Sum) -> Answer | None:
        pieces = self._pieces(self.guests[sender], sum_)
        if not self._rows.are_whole(sum_.batch, pieces, sum_.attempt):
            return None
        self._told[sum_.first] = self._look_at_sums(sum_, pieces)
        return _summed(sender, sum_, self._told[sum_.first])


def _summed(sender: bytes, sum_: Sum, told: Told) -> Answer:
    return Answer(sender, Summed(request=sum_.request, finite=told.finite), [told.norms])
