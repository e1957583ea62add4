"""The core of a server: worker sessions, their gradient rows, and replies when these are due.

It decides nothing by time: what it does with a message follows from the clock (`clock.py`). Pieces
of a batch are applied once, no matter who sends them and how often; a worker gets parameters when
the bound lets it begin a batch. Subclasses say what happens to the rows: a parameter server steps
on their sums (`server.py`), an aggregator passes them on (`aggregator.py`).

It has no socket: `handle` takes a message and returns replies. `loop.py` runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

import msgspec
from torch import Tensor

from shoal.comm.shared_memory import SegmentHandle, SharedSegment
from shoal.comm.wire import BadFrame
from shoal.data.split import shares
from shoal.faults import faultpoint
from shoal.logs import warn_on_screen
from shoal.sync.server.clock import Clock, lag_message
from shoal.sync.server.gradient_rows import GradientRows
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.messages import (
    Acknowledged,
    Apply,
    AskHalt,
    CheckRequest,
    DumpState,
    Fetch,
    FetchedKeys,
    FoundRows,
    Halt,
    JoinRound,
    LoadState,
    LookUpRows,
    MissingRows,
    Pull,
    PulledParameters,
    Push,
    Pushes,
    Reply,
    RequestChecked,
    RequestRefused,
    ServerWelcome,
    Sum,
    Summed,
    WorkerHello,
    WorkerMessage,
)
from shoal.sync.server.parameter_buffers import ParameterBuffers
from shoal.sync.server.records import SumSummary
from shoal.sync.server.session import WorkerSession, open_session
from shoal.sync.server.state_dump import StateDumps
from shoal.sync.server.table_memory import share_tables
from shoal.sync.server.tables import ServerTables
from shoal.sync.state import ShardedState
from shoal.sync.state_chunks import CHUNK_BYTES

Waiting = Sum | Apply | JoinRound | Pull
Views = Sequence[memoryview]


class ServedParameters(Protocol):
    """The parameters that workers see here."""

    layout: ServerLayout
    keys: list[int]
    tables: ServerTables
    sets: ParameterBuffers

    @property
    def values(self) -> dict[int, Tensor]: ...


class ServerCore(ABC):
    def __init__(
        self,
        parameters: ServedParameters,
        *,
        num_seats: int,
        num_pieces: int,
        bound: int | None,
        secret: str,
        rule: str = "mean",
    ):
        self.parameters, self.layout = parameters, parameters.layout
        self.num_seats, self.num_pieces, self.bound, self._rule = num_seats, num_pieces, bound, rule
        self.clock = Clock(num_pieces, bound)
        self.secret, self._digest = secret, parameters.layout.digest
        self._order = parameters.layout.forward_order(parameters.keys)
        self._num_parameters = {
            key: len(parameters.layout.segments(key)) for key in parameters.keys
        }
        self._begun, self._halt = 0, None  # type: int, Halt | None
        self.version = 0  # updates made, and states taken over from workers
        self._summaries: dict[int, SumSummary] = {}  # the last, by first piece
        self.listener = ""  # through which workers of the host come, if they may
        self._shared_tables: list[SharedSegment | None] = []
        if self.in_place:
            parameters.sets.add_second()
            self._shared_tables = share_tables(parameters.tables.slabs)

    @property
    def in_place(self) -> bool:
        """Whether workers read parameters where they stand: they change when all have read."""
        return self.bound == 0

    def tick(self, now: float) -> list[Reply]:
        """What there is to say because time has passed."""
        return []

    @abstractmethod
    def _check_apply(self, apply: Apply) -> None:
        """ValueError if its settings cannot be stepped with."""

    @abstractmethod
    def _apply(self, session: WorkerSession, apply: Apply, pieces: range) -> None:
        """Step on some pieces, all of which are here and none is applied."""

    @abstractmethod
    def _summarize(self, sum_: Sum, pieces: range) -> SumSummary:
        """What is to be said of the sums of some pieces, all of which are here."""

    @abstractmethod
    def _dump(self, dump: DumpState) -> ShardedState: ...
    @abstractmethod
    def _load(self, load: LoadState, payload: Sequence[memoryview]) -> None:
        """Continue from a state."""

    def begin(self, generation: int, num_seats: int | None = None) -> None:
        """Workers greet again; what they pushed and did not apply, they push again."""
        self.generation, self._halt = generation, None  # workers say which halt holds still
        self.num_seats = num_seats or self.num_seats
        self.sessions: dict[bytes, WorkerSession] = {}
        self._dumping = StateDumps()
        own = shares(self.num_pieces, self.num_seats)
        keys = [*self.parameters.keys, *self.parameters.tables.keys]
        self._rows = GradientRows(keys, self.num_pieces, self.in_place, self._rule, own)
        for first, summary in self._summaries.items():
            self._summaries[first] = msgspec.structs.replace(summary, attempt=-1)
        # A worker waits for one answer of a kind at most.
        self._waiting: dict[tuple[bytes, type[Waiting]], Waiting] = {}

    def handle(
        self, sender: bytes, message: WorkerMessage, payload: Sequence[memoryview]
    ) -> list[Reply]:
        """Do what a message asks for. Errors in it go to its sender alone."""
        try:
            return [*self._handle_one(sender, message, payload), *self._serve_waiting()]
        except (BadFrame, ValueError) as error:
            return [Reply(sender, RequestRefused(request=message.request, why=str(error)))]

    def _handle_one(self, sender: bytes, message: WorkerMessage, payload: Views) -> list[Reply]:
        if message.generation != self.generation:
            why = f"this is generation {self.generation}, not {message.generation}"
            return [Reply(sender, RequestRefused(request=message.request, why=why, is_stale=True))]
        if isinstance(message, CheckRequest):
            return [Reply(sender, RequestChecked(request=message.request, turn=message.turn))]
        if isinstance(message, Pushes):
            return list(self._handle_pushes(sender, message, payload))
        return list(self._dispatch(sender, message, payload))

    def _handle_pushes(self, sender: bytes, message: Pushes, payload: Views) -> Iterator[Reply]:
        if len(message.counts) != len(message.pushes) or sum(message.counts) != len(payload):
            raise BadFrame(f"{len(message.pushes)} pushes came with {len(payload)} frames")
        frames = iter(payload)
        own = [list(islice(frames, max(0, count))) for count in message.counts]
        for push, views in zip(message.pushes, own, strict=True):
            try:
                yield from self._handle_one(sender, push, views)
            except (BadFrame, ValueError) as error:
                yield Reply(sender, RequestRefused(request=push.request, why=str(error)))
        if message.then is not None:
            yield from self.handle(sender, message.then, ())

    def _dispatch(self, sender: bytes, message: WorkerMessage, payload: Views) -> Iterator[Reply]:
        if isinstance(message, WorkerHello):
            yield Reply(sender, self._greet(sender, message))
            return
        session = self.sessions.get(sender)
        if session is None:
            raise ValueError("the sender is unknown. Greet first")
        match message:
            case Push():
                self._keep(session, message, payload)
            case Sum() if not self.clock.is_new(message.batch, self._pieces(session, message)):
                yield self._summed_earlier(sender, message)
            case Sum() if summary := self._summary_of(message):
                # A worker with an earlier reply may have begun another attempt.
                yield _summed(sender, message, summary)
            case Sum() | Apply() if missing := self._missing(session, message):
                # What a worker pushed came before what it asks, or will not come.
                yield Reply(sender, MissingRows(request=message.request, keys=missing))
            case Sum() | Apply() | Pull():
                self._check_order(session, message.batch)
                if isinstance(message, Apply):
                    self._check_apply(message)
                self._wait(sender, message)
            case Fetch():
                part = FetchedKeys(request=message.request)
                yield Reply(sender, part, session.fetched(message), stays=True)
            case LookUpRows():
                rows = self._look_up(session, message, payload)
                yield Reply(sender, FoundRows(request=message.request), [rows])
            case AskHalt():
                if self._halt is None or self._halt.step <= self.clock.committed:
                    self._halt = Halt(self._begun + 2, message.for_good)
                    own = shares(self.num_pieces, self.num_seats)
                    if lag := lag_message(self.clock, self._begun, own, message.for_good):
                        warn_on_screen(lag)
                yield Reply(sender, Acknowledged(request=message.request))
            case DumpState():
                yield self._dumping.answer(sender, message, self._dump)
            case LoadState():
                if message.request > session.loaded:  # or else it came twice
                    self._load(message, payload)
                    session.loaded = message.request
                yield Reply(sender, Acknowledged(request=message.request))

    def _greet(self, sender: bytes, hello: WorkerHello) -> ServerWelcome:
        if hello.secret != self.secret:
            raise ValueError("the key is another run's")
        if hello.layout != self._digest:
            raise ValueError("your parameters are laid out differently; is it the same recipe?")
        session = self.sessions.get(sender)  # it came twice
        if session is None:
            session = open_session(
                hello, self.layout, self.num_seats, self.num_pieces, self.bound == 0
            )
            self.sessions[sender] = session
        if hello.version > self.version:
            raise ValueError(
                "it took the place of one that died, and what that did is lost: resume from the "
                "newest checkpoint, with the same command and --resume"
            )
        # What a successor would not know, nor a newcomer.
        self._begun = max(self._begun, hello.batch, self.clock.next_of(lambda _: session.pieces))
        if self._halt is None or (hello.halt is not None and hello.halt.step > self._halt.step):
            self._halt = hello.halt
        return ServerWelcome(
            request=hello.request,
            is_shared=session.rows is not None,
            values=self._shown() if session.rows is not None else [],
            tables=[
                s.place if s is not None else None for s in self._shared_tables if session.rows
            ],
            listener=self.listener if session.rows is not None else "",
            committed=self.clock.committed,
            next_batch=self.clock.next_of(lambda _: session.pieces),
        )

    def _shown(self) -> list[SegmentHandle]:
        """Where parameters stand that workers read; out of lockstep they may change under them."""
        return self.parameters.sets.places if self.in_place else []

    def _check_order(self, session: WorkerSession, batch: int) -> None:
        """A worker comes to a batch by its own pieces of the one before.

        One that is further than that was here with a server whose journal is lost.
        """
        if batch < 0:
            raise ValueError(f"there is no batch {batch}")
        if batch > self.clock.committed and self.clock.is_new(batch - 1, session.pieces):
            raise ValueError(
                f"it was asked for batch {batch}, and of batch {batch - 1} it has nothing. If it "
                "took the place of one that died, what that did is lost: resume from the newest "
                "checkpoint, with the same command and --resume"
            )

    def _keep(self, session: WorkerSession, push: Push, payload: Sequence[memoryview]) -> None:
        """Put rows away until they are applied; what was applied before is left."""
        is_table, batch = push.key in self.parameters.tables.keys, push.batch
        if push.key not in self.parameters.values and not is_table:
            raise ValueError(f"key {push.key} is not held here")
        if len(push.touched) != (1 if is_table else self._num_parameters[push.key]):
            raise ValueError(f"a push of key {push.key} tells of {len(push.touched)} parameters")
        if push.blocks != session.blocks or push.attempt < 0:
            raise ValueError(f"a push of key {push.key} is not of the pieces of its worker")
        if not self.clock.is_new(batch, session.pieces):
            return
        self._check_order(session, batch)
        if not self.clock.may_begin(batch):
            raise ValueError(f"batch {batch} may not be begun yet")
        faultpoint("server.push", batch)
        if is_table:
            if push.lent is not None:
                payload = session.lent.frames(push.lent, self.most_bytes)
            found = self.parameters.tables.rows_of(push.key, payload)
        else:
            found = session.rows_of(push, self.parameters.values[push.key], payload)
        rows = dict(zip(push.blocks, found, strict=True))
        is_whole = self._rows.keep(batch, push.attempt, push.key, rows, push.touched)
        if is_whole and not is_table:
            self.parameters.sets.copy_forward()

    def _look_up(
        self, session: WorkerSession, look: LookUpRows, payload: Sequence[memoryview]
    ) -> Tensor:
        """Rows as of a batch: in lockstep also of one that some servers have stepped on already,
        since after a death it may be computed again."""
        self._check_order(session, look.batch)
        ahead = self.clock.committed - look.batch if self.bound == 0 else 0
        if ahead not in (0, 1):
            raise ValueError(f"rows of batch {look.batch} were asked for in {self.clock.committed}")
        return self.parameters.tables.look_up(look.table, payload, ahead == 1)

    @cached_property
    def most_bytes(self) -> int:
        """That one message may hold: the rows of a key, or a chunk of a state, with names."""
        keys = [self.layout.keys[key].num_bytes for key in self.parameters.keys]
        rows = max([*keys, self.parameters.tables.num_bytes]) * self.num_pieces
        return max(rows, self.layout.most_bytes(self.parameters.keys) + 2 * CHUNK_BYTES)

    def _pieces(self, session: WorkerSession, message: Sum | Apply) -> range:
        """Those that are stepped on together: all in lockstep, else a worker's own."""
        pieces = range(self.num_pieces) if self.bound == 0 else session.pieces
        if (message.first, message.last) != (pieces.start, pieces.stop):
            raise ValueError(
                f"pieces {message.first} to {message.last} were meant, and {pieces.start} to "
                f"{pieces.stop} are stepped on together"
            )
        return pieces

    def _missing(self, session: WorkerSession, message: Sum | Apply) -> list[int]:
        """The keys of which a worker's rows are not here, of a batch that may have been begun."""
        self._check_order(session, message.batch)
        if not self.clock.is_new(message.batch, self._pieces(session, message)):
            return []
        return self._rows.missing(message.batch, session.pieces, message.attempt)

    def _wait(self, sender: bytes, message: Waiting) -> None:
        """Answer it when that can be done."""
        waits = self._waiting.get((sender, type(message)), message)
        if message.request >= waits.request:  # or else it is late, and no worker waits for it
            self._waiting[sender, type(message)] = message

    def _serve_waiting(self) -> Iterator[Reply]:
        for (sender, _), message in self._waiting.items():
            if isinstance(message, Apply):
                self._step_if_whole(self.sessions[sender], message)
        for (sender, kind), message in list(self._waiting.items()):
            answer = self._answer_waiting(sender, message)
            if answer is not None:
                del self._waiting[sender, kind]
                yield answer

    def _answer_waiting(self, sender: bytes, message: Waiting) -> Reply | None:
        if isinstance(message, Sum):
            return self._summed(sender, message)
        assert isinstance(message, Pull | Apply)
        return self._values(sender, message, message.batch + isinstance(message, Apply))

    def _step_if_whole(self, session: WorkerSession, apply: Apply) -> None:
        pieces = self._pieces(session, apply)
        if self.clock.is_new(apply.batch, pieces) and self._is_whole(apply, pieces):
            self._apply(session, apply, pieces)

    def _is_whole(self, apply: Apply, pieces: range) -> bool:
        """Whether all rows are here that are to be stepped on."""
        return self._rows.are_whole(apply.batch, pieces, apply.attempt)

    def _values(self, sender: bytes, pull: Pull | Apply, batch: int) -> Reply | None:
        """The parameters for a batch, if it may be begun."""
        is_due = self.clock.committed >= batch if pull.meets else self.clock.may_begin(batch)
        if not is_due and (isinstance(pull, Apply) or pull.waits):
            return None
        faultpoint("server.pull", batch)
        session = self.sessions[sender]
        self._begun = max(self._begun, batch)
        session.give(pull.request, self.parameters.values, self.version, self.in_place)
        values = PulledParameters(
            request=pull.request,
            committed=self.clock.committed,
            version=session.version,
            number=self.parameters.sets.now,
            halt=self._halt,
            made=session.made,
        )
        return Reply(sender, values, session.first_few(self._order), stays=True)

    def _summed_earlier(self, sender: bytes, sum_: Sum) -> Reply:
        """They were applied before the answer came through."""
        summary = self._summaries.get(sum_.first)
        if summary is None or summary.batch != sum_.batch:
            raise ValueError(f"batch {sum_.batch} is over")
        return _summed(sender, sum_, summary)

    def _summary_of(self, sum_: Sum) -> SumSummary | None:
        summary = self._summaries.get(sum_.first)
        return (
            summary
            if summary and (summary.batch, summary.attempt) == (sum_.batch, sum_.attempt)
            else None
        )

    def _summed(self, sender: bytes, sum_: Sum) -> Reply | None:
        pieces = self._pieces(self.sessions[sender], sum_)
        if not self._rows.are_whole(sum_.batch, pieces, sum_.attempt):
            return None
        self._summaries[sum_.first] = self._summarize(sum_, pieces)
        return _summed(sender, sum_, self._summaries[sum_.first])


def _summed(sender: bytes, sum_: Sum, summary: SumSummary) -> Reply:
    return Reply(sender, Summed(request=sum_.request, finite=summary.finite), [summary.norms])
