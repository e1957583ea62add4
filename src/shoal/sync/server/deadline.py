"""A server of rounds that close at a deadline: it steps on the rows that came, not on all pieces.

Each worker first asks every other server whether its rows are there, and then joins the round at
server 0, whose coordinator (`round_coordinator.py`) decides which replicas are in; the decision is
written to the journal before any worker gets it. Workers in the round pass it on to all servers
when they ask them to step, so all step on the same rows. Workers do not read parameters in place,
since a round may close while a late replica computes. Time enters by `tick` only. Read next:
`outer_client.py`, a worker's side.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from torch import Tensor

from shoal.faults import faultpoint
from shoal.sync.server.clock import Clock
from shoal.sync.server.core import Waiting
from shoal.sync.server.messages import (
    Acknowledged,
    Apply,
    CheckRows,
    JoinRound,
    MissingRows,
    Reply,
    RoundClosed,
    ServerWelcome,
    WorkerHello,
    WorkerMessage,
)
from shoal.sync.server.records import JournalRecord
from shoal.sync.server.round_coordinator import (
    ClosedRounds,
    Contribution,
    RoundCoordinator,
    first_rounds,
)
from shoal.sync.server.server import Server
from shoal.sync.server.session import WorkerSession
from shoal.sync.server.shard import ServerShard


class _RoundsRecord(msgspec.Struct, frozen=True, tag="rounds"):
    """In the journal: what is decided, and the record of a snapshot if there is one beside it."""

    rounds: ClosedRounds
    rest: bytes = b""


class DeadlineServer(Server):
    """One of several has a coordinator."""

    def __init__(self, shard: ServerShard, coordinator: RoundCoordinator | None, **given: Any):
        self.coordinator = coordinator
        super().__init__(shard, **given)

    @property
    def in_place(self) -> bool:
        return False

    def begin(self, generation: int, num_seats: int | None = None) -> None:
        super().begin(generation, num_seats)
        if self.coordinator is not None:
            self.coordinator.begin()

    def tick(self, now: float) -> list[Reply]:
        if self.coordinator is None:
            return []
        self.coordinator.tick(now)
        self._close()
        return list(self._serve_waiting())

    def redo(self, header: bytes | memoryview, frames: Sequence[bytes | memoryview]) -> None:
        try:
            decided = msgspec.msgpack.decode(header, type=_RoundsRecord)
        except msgspec.ValidationError:
            super().redo(header, frames)
            return
        assert self.coordinator is not None
        self.coordinator.commit(decided.rounds)
        if decided.rest:
            super().redo(decided.rest, frames)

    def snapshot(self) -> JournalRecord:
        header, frames = super().snapshot()
        if self.coordinator is None:
            return header, frames
        return msgspec.msgpack.encode(_RoundsRecord(self.coordinator.rounds, header)), frames

    def _dispatch(
        self, sender: bytes, message: WorkerMessage, payload: Sequence[memoryview]
    ) -> Iterator[Reply]:
        session = self.sessions.get(sender)
        if session is None or not isinstance(message, CheckRows | JoinRound | Apply):
            yield from super()._dispatch(sender, message, payload)
            return
        self._check_order(session, message.batch)
        missing = self._rows.missing(message.batch, session.pieces, message.attempt)
        if missing and self.clock.is_new(message.batch, session.pieces):
            yield Reply(sender, MissingRows(request=message.request, keys=missing))
        elif isinstance(message, CheckRows):
            yield Reply(sender, Acknowledged(request=message.request))
        else:
            if isinstance(message, JoinRound):
                self._join(session, message)
            else:
                self._check_apply(message)
            self._wait(sender, message)

    def _join(self, session: WorkerSession, join: JoinRound) -> None:
        if self.coordinator is None:
            raise ValueError("only the first server decides who is in a round")
        seat, contribution = session.pieces.start, Contribution(join.num_samples, join.mark)
        halts = self._halt is not None and self._halt.step == join.batch + 1
        if self.coordinator.result(join.batch, seat) is None:
            self.coordinator.join(join.batch, seat, contribution, join.waits or halts)
        self._close()

    def _close(self) -> None:
        assert self.coordinator is not None
        rounds = self.coordinator.close()
        if rounds is None:
            return
        if self.journal is not None:  # before any worker gets it
            self.journal.append(msgspec.msgpack.encode(_RoundsRecord(rounds)), [])
        self.coordinator.commit(rounds)
        faultpoint("server.decided", rounds.num_rounds - 1)

    def _answer_waiting(self, sender: bytes, message: Waiting) -> Reply | None:
        if isinstance(message, JoinRound):
            return self._round_closed(sender, message)
        return super()._answer_waiting(sender, message)

    def _round_closed(self, sender: bytes, join: JoinRound) -> Reply | None:
        assert self.coordinator is not None
        result = self.coordinator.result(join.batch, self.sessions[sender].pieces.start)
        if result is None:
            return None
        rounds = self.coordinator.rounds
        joined = RoundClosed(
            request=join.request,
            is_in=result.is_in,
            counts=result.counts,
            mark=result.mark,
            num_rounds=rounds.num_rounds,
            num_early=rounds.num_early,
            num_late=rounds.num_late,
        )
        return Reply(sender, joined)

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

    def _check_order(self, session: WorkerSession, batch: int) -> None:
        """A late worker comes to a batch by a round that it was not in, perhaps before this server
        has stepped on it."""
        if not 0 <= batch <= self.clock.committed + 1:
            super()._check_order(session, batch)

    def _check_apply(self, apply: Apply) -> None:
        if len(apply.counts) != self.num_pieces or not any(apply.counts):
            raise ValueError(f"{len(apply.counts)} counts came for {self.num_pieces} replicas")
        if not all(0 <= count <= self.num_pieces for count in apply.counts):
            raise ValueError(f"counts of {apply.counts} are not those of a round")
        super()._check_apply(apply)

    def _greet(self, sender: bytes, hello: WorkerHello) -> ServerWelcome:
        welcome = super()._greet(sender, hello)
        if self.coordinator is None:
            return welcome
        begins = self.coordinator.next_of(self.sessions[sender].pieces.start)
        return msgspec.structs.replace(welcome, next_batch=min(welcome.next_batch, begins))

    def _resume(self, clock: Clock, version: int) -> None:
        if self.coordinator is not None:
            self.coordinator.commit(first_rounds(self.num_seats, clock.committed))
        super()._resume(clock, version)


def _counted(apply: Apply) -> list[range]:
    """The pieces that are in a round, one by one."""
    return [range(piece, piece + 1) for piece, count in enumerate(apply.counts) if count]
