"""A server of rounds that close at a deadline: it steps on what came, and not on all pieces.

Each worker first asks every other server whether its rows are there, and then joins the round at
server 0, whose referee (`referee.py`) decides who is in; the decision is written down before it is
told. Workers that are in it bring it to all servers with the question to step, so all step on the
same rows. Parameters are not read where they stand, since a round may close while a late replica
computes. `tick` is the only way in which time comes in. Read next: `windows.py`, a worker's side.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from torch import Tensor

from shoal.faults import faultpoint
from shoal.sync.server.clock import Clock
from shoal.sync.server.guests import Guest
from shoal.sync.server.messages import (
    Answer,
    Apply,
    Done,
    Hello,
    Join,
    Joined,
    Kept,
    Missing,
    Welcome,
    WorkerMessage,
)
from shoal.sync.server.reception import Waiting
from shoal.sync.server.records import Record
from shoal.sync.server.referee import Brought, Referee, Rounds, no_rounds
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard


class _Decided(msgspec.Struct, frozen=True, tag="rounds"):
    """In the journal: what is decided, and the record of a snapshot if there is one beside it."""

    rounds: Rounds
    rest: bytes = b""


class DeadlineServer(Server):
    """One of several has a referee."""

    def __init__(self, shard: Shard, referee: Referee | None, **given: Any):
        self.referee = referee
        super().__init__(shard, **given)

    @property
    def in_place(self) -> bool:
        return False

    def begin(self, generation: int, num_seats: int | None = None) -> None:
        super().begin(generation, num_seats)
        if self.referee is not None:
            self.referee.begin()

    def tick(self, now: float) -> list[Answer]:
        if self.referee is None:
            return []
        self.referee.tick(now)
        self._close()
        return list(self._serve_waiting())

    def redo(self, header: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> None:
        try:
            decided = msgspec.msgpack.decode(header, type=_Decided)
        except msgspec.ValidationError:
            super().redo(header, frames)
            return
        assert self.referee is not None
        self.referee.take(decided.rounds)
        if decided.rest:
            super().redo(decided.rest, frames)

    def snapshot(self) -> Record:
        header, frames = super().snapshot()
        if self.referee is None:
            return header, frames
        return msgspec.msgpack.encode(_Decided(self.referee.rounds, header)), frames

    def _take_in(
        self, sender: bytes, message: WorkerMessage, payload: Sequence[memoryview]
    ) -> Iterator[Answer]:
        guest = self.guests.get(sender)
        if guest is None or not isinstance(message, Kept | Join | Apply):
            yield from super()._take_in(sender, message, payload)
            return
        self._refuse_early(guest, message.batch)
        missing = self._rows.missing(message.batch, guest.pieces, message.attempt)
        if missing and self.clock.is_new(message.batch, guest.pieces):
            yield Answer(sender, Missing(request=message.request, keys=missing))
        elif isinstance(message, Kept):
            yield Answer(sender, Done(request=message.request))
        else:
            if isinstance(message, Join):
                self._join(guest, message)
            else:
                self._refuse_apply(message)
            self._wait(sender, message)

    def _join(self, guest: Guest, join: Join) -> None:
        if self.referee is None:
            raise ValueError("only the first server decides who is in a round")
        seat, brought = guest.pieces.start, Brought(join.num_samples, join.mark)
        halts = self._halt is not None and self._halt.step == join.batch + 1
        if self.referee.verdict(join.batch, seat) is None:
            self.referee.join(join.batch, seat, brought, join.waits or halts)
        self._close()

    def _close(self) -> None:
        assert self.referee is not None
        rounds = self.referee.close()
        if rounds is None:
            return
        if self.journal is not None:  # before anybody hears of it
            self.journal.append(msgspec.msgpack.encode(_Decided(rounds)), [])
        self.referee.take(rounds)
        faultpoint("server.decided", rounds.num_rounds - 1)

    def _answer_waiting(self, sender: bytes, message: Waiting) -> Answer | None:
        if isinstance(message, Join):
            return self._verdict(sender, message)
        return super()._answer_waiting(sender, message)

    def _verdict(self, sender: bytes, join: Join) -> Answer | None:
        assert self.referee is not None
        verdict = self.referee.verdict(join.batch, self.guests[sender].pieces.start)
        if verdict is None:
            return None
        rounds = self.referee.rounds
        joined = Joined(
            request=join.request,
            is_in=verdict.is_in,
            counts=verdict.counts,
            mark=verdict.mark,
            num_rounds=rounds.num_rounds,
            num_early=rounds.num_early,
            num_late=rounds.num_late,
        )
        return Answer(sender, joined)

    def _is_whole(self, apply: Apply, pieces: range) -> bool:
        """Others that are in the round push again, if they have not after a death."""
        return not any(
            self._rows.missing(apply.batch, piece, apply.attempt) for piece in _counted(apply)
        )

    def _sums(self, apply: Apply, pieces: range) -> tuple[dict[int, Tensor], dict[int, list[bool]]]:
        """Rows times what they count, added in the order of seats."""
        if all(count == 1.0 for count in apply.counts):
            return super()._sums(apply, pieces)
        sums: dict[int, Tensor] = {}
        touched: dict[int, list[bool]] = {}
        for piece in _counted(apply):
            rows, own = super()._sums(apply, piece)
            for key, row in rows.items():
                row = row * apply.counts[piece.start]
                sums[key] = sums[key].add_(row) if key in sums else row
                touched[key] = [a or b for a, b in zip(own[key], touched.get(key, own[key]))]
        return sums, touched

    def _refuse_early(self, guest: Guest, batch: int) -> None:
        """A late worker comes to a batch by a round that it was not in, perhaps before this server
        has stepped on it."""
        if not 0 <= batch <= self.clock.committed + 1:
            super()._refuse_early(guest, batch)

    def _refuse_apply(self, apply: Apply) -> None:
        if len(apply.counts) != self.num_pieces or not any(apply.counts):
            raise ValueError(f"{len(apply.counts)} counts came for {self.num_pieces} replicas")
        if not all(0 <= count <= self.num_pieces for count in apply.counts):
            raise ValueError(f"counts of {apply.counts} are not those of a round")
        super()._refuse_apply(apply)

    def _greet(self, sender: bytes, hello: Hello) -> Welcome:
        welcome = super()._greet(sender, hello)
        if self.referee is None:
            return welcome
        begins = self.referee.next_of(self.guests[sender].pieces.start)
        return msgspec.structs.replace(welcome, next_batch=min(welcome.next_batch, begins))

    def _go_on(self, clock: Clock, version: int) -> None:
        if self.referee is not None:
            self.referee.take(no_rounds(self.num_seats, clock.committed))
        super()._go_on(clock, version)


def _counted(apply: Apply) -> list[range]:
    """The pieces that are in a round, one by one."""
    return [range(piece, piece + 1) for piece, count in enumerate(apply.counts) if count]
