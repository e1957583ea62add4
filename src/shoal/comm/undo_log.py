"""How ranks of one host update memory that all of them read, so that a death tears nothing.

Each rank has a row of words in the memory, which it alone writes. Before an update every rank says
that it KNOWS what is to be done; no rank begins before all do. So a rank that dies before that has
changed nothing, and the update of one that dies after it can be finished by any other: before a
chunk is changed it is LOGGED, and MARKED when it is changed. A rank that finds another gone that
knew puts the chunk back that it was at, and does the rest in its stead; the kernel gives up the
lock of one that dies at that. A rank that leaves the group says so in its row.

Only for CPUs that keep the order of stores (x86), as `shared_rounds.py`. Read next:
`sync/host_state.py`, for what is updated.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import Protocol

from shoal.comm.flight_recorder import RECORDER
from shoal.comm.shared_group import LONGEST_PAUSE_S, LOOK_S, SPINS, is_gone
from shoal.comm.shared_memory import SharedSegment
from shoal.errors import GroupLost, ShoalError
from shoal.faults import faultpoint

ROW_WORDS = 32
_WORD = 8  # bytes
_PID, _LEFT, _KNOWS, _LOGGED, _MARKED, _DONE = 0, 1, 8, 16, 17, 24
_CHUNKS = 1 << 24  # that an update may have at most


def words_bytes(num_ranks: int) -> int:
    return num_ranks * ROW_WORDS * _WORD


class Chunks(Protocol):
    """What an update is made of: the chunks of each rank, in order."""

    def begin(self) -> None:
        """All know of it, so it will be made."""
        ...

    def count(self, rank: int) -> int: ...
    def log(self, rank: int, number: int) -> None:
        """Copy what the chunk holds to where it can be put back from."""
        ...

    def put_back(self, rank: int, number: int) -> None: ...
    def change(self, rank: int, number: int) -> None: ...


class UndoLog:
    """One rank's view of the rows. `begin`, then `update` as often as there is something to do;
    `leave` at any time. Every rank calls the first two."""

    def __init__(
        self,
        segment: SharedSegment,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        is_lost: Callable[[], bool],
    ):
        self.rank, self.num_ranks = rank, num_ranks
        self._segment, self._timeout_s, self._is_lost = segment, timeout_s, is_lost
        self._words = segment.bytes[: words_bytes(num_ranks)].numpy().data.cast("B").cast("q")
        self.number = 0  # of the update under way, or of the last one

    def begin(self) -> None:
        """A new group; all must have called it before any of them updates."""
        self.number = 0
        for column in (_LEFT, _KNOWS, _LOGGED, _MARKED, _DONE):
            self._tell(column, 0)
        self._tell(_PID, os.getpid())

    def leave(self) -> None:
        self._tell(_LEFT, 1)
        self._segment.close()  # but for tensors that view it

    def update(self, chunks: Chunks) -> None:
        """Change this rank's chunks, and wait until all are changed.

        GroupLost, and nothing changed, if a rank is gone before all knew of the update. From there
        on it is finished, whichever rank dies. Every rank must call it.
        """
        self.number += 1
        self._tell(_KNOWS, self.number)
        faultpoint("update.known", self.number - 1)
        with RECORDER.blocked:
            self._wait(_KNOWS, self._refuse_gone)
        chunks.begin()
        self._finish(chunks, self.rank, 0)
        faultpoint("update.done", self.number - 1)
        with RECORDER.blocked:
            self._wait(_DONE, lambda rank: self._stand_in(chunks, rank))

    def _finish(self, chunks: Chunks, rank: int, first: int) -> None:
        for number in range(first, chunks.count(rank)):
            chunks.log(rank, number)
            self._tell(_LOGGED, self._mark(number), rank)
            chunks.change(rank, number)
            self._tell(_MARKED, self._mark(number), rank)
        self._tell(_DONE, self.number, rank)

    def _refuse_gone(self, rank: int) -> None:
        row = rank * ROW_WORDS
        gone = is_gone(self._words[row + _PID])
        if (gone or self._words[row + _LEFT]) and self._words[row + _KNOWS] < self.number:
            raise GroupLost(f"rank {rank} of the group is gone before the update")

    def _stand_in(self, chunks: Chunks, rank: int) -> None:
        """If a rank is gone in the middle of its update, finish it."""
        row = rank * ROW_WORDS
        if not is_gone(self._words[row + _PID]):
            return
        with self._segment.lock(rank):
            if self._words[row + _DONE] >= self.number:
                return  # another rank has
            faultpoint("update.standing_in", self.number - 1)
            marked = self._chunks_done(self._words[row + _MARKED])
            if self._chunks_done(self._words[row + _LOGGED]) > marked:
                chunks.put_back(rank, marked)
            self._finish(chunks, rank, marked)

    def _mark(self, number: int) -> int:
        return self.number * _CHUNKS + number + 1

    def _chunks_done(self, mark: int) -> int:
        """How many chunks a mark stands for; none if it is of an earlier update."""
        return mark % _CHUNKS if mark // _CHUNKS == self.number else 0

    def _tell(self, column: int, value: int, rank: int | None = None) -> None:
        self._words[(self.rank if rank is None else rank) * ROW_WORDS + column] = value

    def _wait(self, column: int, look_at: Callable[[int], None]) -> None:
        """Until all rows have this update's number; `look_at` ranks that do not, now and then."""
        began = looked = time.monotonic()
        for count in itertools.count():
            late = [r for r in range(self.num_ranks) if self._is_late(r, column)]
            if not late:
                return
            if count < SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            time.sleep(min(LONGEST_PAUSE_S, (now - began) / 32))
            if now - looked > (LONGEST_PAUSE_S if self._is_lost() else LOOK_S):
                looked = now
                for rank in late:
                    look_at(rank)
            if now - began > self._timeout_s:
                raise ShoalError(
                    f"Rank {late[0]} did not update its share of the parameters within "
                    f"{self._timeout_s:g} s, and is not gone. Its process may be stopped; resume "
                    "from the newest checkpoint with --resume."
                )

    def _is_late(self, rank: int, column: int) -> bool:
        return bool(self._words[rank * ROW_WORDS + column] < self.number)
