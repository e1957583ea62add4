"""A parameter server: takes in rows of gradients, steps on their sums, hands parameters out.

It decides nothing by time. What it does with a message follows from the clock (`clock.py`): pieces
of a batch are applied once, whoever sends them and how often; a worker is given parameters when the
bound lets it begin. With bound 0 a sum is over all pieces of a batch, in the order of the tree
(`comm/tree.py`), so that training through servers has the bits of training without; otherwise each
worker's pieces are a step of their own.

`Server` has no socket: `take_in` is given a message and says what to answer. `serve.py` runs it.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
from torch import Tensor

from shoal.comm.shared_memory import Place
from shoal.comm.wire import BadFrame
from shoal.data.split import shares
from shoal.faults import faultpoint
from shoal.numerics.norms import values_of
from shoal.sync.server.clock import Clock
from shoal.sync.server.guests import Guest, guest_of
from shoal.sync.server.journal import Journal
from shoal.sync.server.messages import (
    Answer,
    Applied,
    Apply,
    Check,
    Checked,
    Done,
    Dump,
    Dumped,
    Found,
    FromServer,
    Halt,
    Hello,
    Load,
    Look,
    Missing,
    Pull,
    Push,
    Refused,
    Stop,
    Sum,
    Summed,
    Values,
    Welcome,
    WorkerMessage,
)
from shoal.sync.server.records import (
    Diary,
    Past,
    Record,
    Told,
    redo,
    snapshot_record,
    update_record,
)
from shoal.sync.server.rows import Rows
from shoal.sync.server.shard import Shard
from shoal.sync.state import Source, pack_state


class Server:
    def __init__(
        self,
        shard: Shard,
        *,
        num_seats: int,
        num_pieces: int,
        bound: int | None,
        secret: str,
        rule: str = "mean",
        journal: Journal | None = None,
    ):
        """With a journal, go on where a predecessor was when it died."""
        self.shard, self.layout = shard, shard.layout
        self.num_seats, self.num_pieces = num_seats, num_pieces
        self.bound, self._rule = bound, rule
        self.clock = Clock(num_pieces, bound)
        self.secret, self._digest = secret, shard.layout.digest
        self._begun, self._halt = 0, None  # type: int, Halt | None
        self.version = 0  # updates made, and states taken over from workers
        if bound == 0:
            shard.sets.double()
        self._told: dict[int, Told] = {}  # the last, by first piece
        self.journal: Diary | None = journal
        for header, frames in journal.read() if journal is not None else ():
            self.redo(header, frames)
        self.begin(-1)

    def redo(self, header: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> None:
        """Do what a predecessor wrote down."""
        past = Past(self.clock, self.version, self._told)
        self.clock, self.version, told = redo(header, frames, self.shard, past)
        self._told, self._begun = dict(told), self.clock.committed

    def snapshot(self) -> Record:
        """All that a successor needs to know."""
        return snapshot_record(self.shard, Past(self.clock, self.version, self._told))

    def begin(self, generation: int, num_seats: int | None = None) -> None:
        """Workers greet anew; what they pushed and did not apply, they push again."""
        self.generation = generation
        self.num_seats = num_seats or self.num_seats
        self.guests: dict[bytes, Guest] = {}
        own = shares(self.num_pieces, self.num_seats)
        keys = [*self.shard.keys, *self.shard.tables.keys]
        self._rows = Rows(keys, self.num_pieces, self.bound == 0, self._rule, own)
        for first, told in self._told.items():
            self._told[first] = msgspec.structs.replace(told, attempt=-1)
        # A worker waits for one answer of a kind at most.
        self._waiting: dict[tuple[bytes, type[Sum | Pull]], Sum | Pull] = {}

    def take_in(
        self, sender: bytes, message: WorkerMessage, payload: Sequence[memoryview]
    ) -> list[Answer]:
        """Do what a message asks for. Whatever is wrong with it is said to its sender alone."""
        if message.generation != self.generation:
            why = f"this is generation {self.generation}, not {message.generation}"
            return [Answer(sender, Refused(request=message.request, why=why, is_stale=True))]
        if isinstance(message, Check):
            return [Answer(sender, Checked(request=message.request, turn=message.turn))]
        try:
            return [*self._take_in(sender, message, payload), *self._serve_waiting()]
        except (BadFrame, ValueError) as error:
            return [Answer(sender, Refused(request=message.request, why=str(error)))]

    def _take_in(
        self, sender: bytes, message: WorkerMessage, payload: Sequence[memoryview]
    ) -> Iterator[Answer]:
        if isinstance(message, Hello):
            yield Answer(sender, self._greet(sender, message))
            return
        guest = self.guests.get(sender)
        if guest is None:
            raise ValueError("who are you? Greet first")
        match message:
            case Push():
                self._keep(guest, message, payload)
            case Apply():
                yield Answer(sender, self._apply(guest, message))
            case Sum() if not self.clock.is_new(message.batch, self._pieces(guest, message)):
                yield self._summed_before(sender, message)
            case Sum() if told := self._told_of(message):
                # Whoever was told first may have begun another attempt.
                yield _summed(sender, message, told)
            case Sum() if missing := self._missing(guest.pieces, guest, message):
                # What a worker pushed came before what it asks, or will not come.
                yield Answer(sender, Missing(request=message.request, keys=missing))
            case Sum() | Pull():
                self._refuse_early(guest, message.batch)
                waits = self._waiting.get((sender, type(message)), message)
                if message.request >= waits.request:  # or else it is late, and nobody waits for it
                    self._waiting[sender, type(message)] = message
            case Look():
                yield Answer(
                    sender, Found(request=message.request), [self._look_up(guest, message, payload)]
                )
            case Stop():
                if self._halt is None or self._halt.step <= self.clock.committed:
                    self._halt = Halt(self._begun + 2, message.for_good)
                yield Answer(sender, Done(request=message.request))
            case Dump():
                state = pack_state(self.shard.dump(message.gradients, message.tables))
                yield Answer(sender, Dumped(request=message.request), state)
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
        # What a successor would not know.
        self._begun = max(self._begun, hello.batch)
        if self._halt is None or (hello.halt is not None and hello.halt.step > self._halt.step):
            self._halt = hello.halt
        return Welcome(
            request=hello.request,
            is_shared=guest.rows is not None,
            values=self._shown() if guest.rows is not None else [],
            committed=self.clock.committed,
            next_batch=self.clock.next_of(lambda batch: guest.pieces),
        )

    def _shown(self) -> list[Place]:
        """Where parameters stand that workers read; out of lockstep they may change under them."""
        return self.shard.sets.places if self.bound == 0 else []

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
        is_table, batch = push.key in self.shard.tables.keys, push.batch
        if push.key not in self.shard.values and not is_table:
            raise ValueError(f"key {push.key} is not held here")
        if len(push.touched) != (1 if is_table else len(self.layout.segments(push.key))):
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
            found = self.shard.tables.rows_of(push.key, payload)
        else:
            found = guest.rows_of(push, self.shard.values[push.key], payload)
        rows = dict(zip(push.blocks, found, strict=True))
        is_whole = self._rows.keep(batch, push.attempt, push.key, rows, push.touched)
        if is_whole and not is_table:
            self.shard.sets.copy_ahead(push.key)

    def _look_up(self, guest: Guest, look: Look, payload: Sequence[memoryview]) -> Tensor:
        """Rows as of a batch: in lockstep also of one that some servers have stepped on already,
        since after a death it may be computed again."""
        self._refuse_early(guest, look.batch)
        ahead = self.clock.committed - look.batch
        if self.bound == 0 and ahead not in (0, 1):
            raise ValueError(f"rows of batch {look.batch} were asked for in {self.clock.committed}")
        return self.shard.tables.look_up(look.table, payload, self.bound == 0 and ahead == 1)

    def _damped(self, apply: Apply) -> Apply:
        """An update made of old parameters counts less: by one more for each batch since then.

        Zhang et al. 2016, arXiv 1511.05950.
        """
        if apply.pulled is None:
            return apply
        num_batches = (self.version - apply.pulled) / self.num_seats
        return msgspec.structs.replace(apply, factor=apply.factor / (1 + max(0.0, num_batches)))

    def _apply(self, guest: Guest, apply: Apply) -> FromServer:
        pieces = self._pieces(guest, apply)
        if not self.clock.is_new(apply.batch, pieces):
            return Applied(request=apply.request, version=-1)  # it came twice
        if missing := self._missing(pieces, guest, apply):
            return Missing(request=apply.request, keys=missing)
        apply = self._damped(apply)
        if not math.isfinite(apply.scale) or not 0 < apply.factor < math.inf:
            raise ValueError(f"nobody steps with scale {apply.scale} and factor {apply.factor}")
        self.shard.refuse_settings(apply.settings)
        faultpoint("server.apply", apply.batch)
        sums = self._rows.sums(apply.batch, pieces)
        touched = self._rows.touched(apply.batch, pieces)
        if self.journal is not None and self.journal.is_long:
            # Of before the step, so that the last record is always a step: rows of tables as they
            # were before it can be asked for.
            self.journal.begin(*self.snapshot())
        try:
            self.shard.apply(sums, touched, apply.scale, apply.factor, apply.settings)
        except ValueError as error:  # nobody goes on from half a step
            raise RuntimeError(f"The optimizer's step failed: {error}") from error
        self.clock.apply(apply.batch, pieces)
        self.version += 1
        faultpoint("server.unwritten", apply.batch)
        if self.journal is not None:
            # Before it is answered: an update that a worker knows of outlives this process.
            told = [one for one in self._told.values() if one.batch == apply.batch]
            record = update_record(apply, sums, touched, told, self.shard.tables)
            self.journal.append(*record)
        faultpoint("server.applied", apply.batch)
        self._rows.forget(apply.batch, pieces, self.clock.committed)
        return Applied(request=apply.request, version=self.version - 1)

    @property
    def most_bytes(self) -> int:
        """That one message may hold: the rows of a key, or a state of this server."""
        keys = [self.layout.keys[key].num_bytes for key in self.shard.keys]
        tables = self.shard.tables.num_bytes
        rows = max([*keys, tables]) * self.num_pieces
        return max(rows, self.layout.most_bytes(self.shard.keys) + 16 * tables)

    def _pieces(self, guest: Guest, message: Sum | Apply) -> range:
        """Those that are stepped on together: all in lockstep, else a worker's own."""
        pieces = range(self.num_pieces) if self.bound == 0 else guest.pieces
        if (message.first, message.last) != (pieces.start, pieces.stop):
            raise ValueError(
                f"pieces {message.first} to {message.last} were meant, and {pieces.start} to "
                f"{pieces.stop} are stepped on together"
            )
        return pieces

    def _missing(self, pieces: range, guest: Guest, message: Sum | Apply) -> list[int]:
        """The keys of which some rows are not here, of a batch that may have been begun."""
        self._refuse_early(guest, message.batch)
        return self._rows.missing(message.batch, pieces, message.attempt)

    def _load(self, load: Load, payload: Sequence[memoryview]) -> None:
        clock = Clock(self.num_pieces, self.bound, load.step)
        self.shard.take_over(payload)
        self._go_on(clock, self.version + 1)

    def go_on_from(self, source: Source, step: int, version: int) -> None:
        """Hold the state after a step, which is of so many updates."""
        self.shard.load_state_dict(source)
        self._go_on(Clock(self.num_pieces, self.bound, step), version)

    def _go_on(self, clock: Clock, version: int) -> None:
        self.clock, self.version = clock, version
        self._rows.clear()
        self._begun, self._told = clock.committed, {}
        if self.journal is not None:
            self.journal.begin(*self.snapshot())

    def _serve_waiting(self) -> Iterator[Answer]:
        for (sender, kind), message in list(self._waiting.items()):
            answer = (
                self._values(sender, message)
                if isinstance(message, Pull)
                else self._summed(sender, message)
            )
            if answer is not None:
                del self._waiting[sender, kind]
                yield answer

    def _values(self, sender: bytes, pull: Pull) -> Answer | None:
        if not self.clock.may_begin(pull.batch):
            return None
        if pull.meets and self.clock.committed < pull.batch:
            return None
        faultpoint("server.pull", pull.batch)
        guest = self.guests[sender]
        self._begun = max(self._begun, pull.batch)
        shared = guest.rows is not None
        is_new, guest.pulled = pull.request > guest.pulled, max(pull.request, guest.pulled)
        # Where they stand they may change under the reader. A question that came twice may find
        # the next gradients in these rows.
        if shared and self.bound != 0 and is_new:
            for key, value in self.shard.values.items():
                guest.place(key, 0, value).copy_(value)
        values = Values(
            request=pull.request,
            committed=self.clock.committed,
            version=self.version,
            number=self.shard.sets.now,
            halt=self._halt,
        )
        return Answer(sender, values, () if shared else list(self.shard.values.values()))

    def _summed_before(self, sender: bytes, sum_: Sum) -> Answer:
        """They were applied before the answer came through."""
        told = self._told.get(sum_.first)
        if told is None or told.batch != sum_.batch:
            raise ValueError(f"batch {sum_.batch} is over")
        return _summed(sender, sum_, told)

    def _told_of(self, sum_: Sum) -> Told | None:
        told = self._told.get(sum_.first)
        same = told is not None and (told.batch, told.attempt) == (sum_.batch, sum_.attempt)
        return told if same else None

    def _summed(self, sender: bytes, sum_: Sum) -> Answer | None:
        pieces = self._pieces(self.guests[sender], sum_)
        if self._rows.missing(sum_.batch, pieces, sum_.attempt):
            return None
        norms, finite = b"", True
        if sum_.want_norms or sum_.want_finite:
            sums = self._rows.sums(sum_.batch, pieces)
            norms = self.shard.norms(sums).numpy().tobytes()
            finite = all(bool(values_of(total).isfinite().all()) for total in sums.values())
        self._told[sum_.first] = Told(sum_.batch, sum_.first, finite, norms, sum_.attempt)
        return _summed(sender, sum_, self._told[sum_.first])


def _summed(sender: bytes, sum_: Sum, told: Told) -> Answer:
    return Answer(sender, Summed(request=sum_.request, finite=told.finite), [told.norms])
