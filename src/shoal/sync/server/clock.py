"""How far a run on parameter servers has come, and which batches may be begun. Pure.

Workers push their pieces of global batches, each at its own speed. A batch is committed when all
its pieces, and those of all batches before it, are applied; a worker may begin a batch while it is
at most `bound` ahead of that. So bound 0 is lockstep, and None is no bound. The batch that all wait
for may always be begun, so there is no deadlock if each worker takes the earliest of its batches
first, also of those it took over from a dead worker. Pieces and not workers are counted: those of
the dead can be assigned to any worker, and they identify a message that comes twice.

Cost: one number for each batch that is begun and not committed. Ho et al. 2013, "More effective
distributed ML via a stale synchronous parallel parameter server". Read next: `placement.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec


class ClockRecord(msgspec.Struct, frozen=True):
    """A clock at rest or on its way: `applied` has runs of pieces as (batch, first, end)."""

    num_pieces: int
    bound: int | None
    committed: int
    applied: list[tuple[int, int, int]]


FAR = 3  # batches behind the fastest worker, which are worth a word


def lag_message(clock: "Clock", begun: int, shares: Sequence[range], for_good: bool) -> str:
    """What holds up a halt after the batch that was `begun` furthest, if a worker is far behind.

    What the fastest has done cannot be taken back, and a state is saved or handed over only where
    all batches before it are whole: so the slowest comes there, too.
    """
    nexts = [clock.next_of(lambda _, own=own: own) for own in shares]  # type: ignore[misc]
    slowest = min(range(len(nexts)), key=nexts.__getitem__)
    lag = begun - nexts[slowest]
    if lag < FAR:
        return ""
    way_out = " A second Ctrl-C ends the run now; its newest checkpoint stays." if for_good else ""
    do = "stop" if for_good else "meet"
    return (
        f"All {do} where the fastest worker is. Rank {slowest} is {lag} batches behind it, and "
        f"does them first.{way_out}"
    )


class Clock:
    """Which pieces of which global batches are applied, and which batches may be begun.

    `committed` is the number of batches that are, and so the number of the first that is not.
    """

    def __init__(self, num_pieces: int, bound: int | None, committed: int = 0):
        if num_pieces < 1 or committed < 0 or (bound is not None and bound < 0):
            raise ValueError(
                f"No clock has {num_pieces} pieces, bound {bound} and {committed} committed "
                "batches. Give at least 1 piece, and a bound and a count from 0 on."
            )
        self.num_pieces, self.bound, self.committed = num_pieces, bound, committed
        self._applied: dict[int, int] = {}  # batch: a bit for each piece
        self._all = (1 << num_pieces) - 1

    def is_new(self, batch: int, pieces: range) -> bool:
        """Whether none of these pieces is applied yet; ValueError if only some are.

        Some are when they were dealt again to others. Nothing of such a push can be used, since it
        is one sum: its sender pushes what is missing.
        """
        wanted, applied = self._bits(batch, pieces), self._of(batch)
        if wanted & applied not in (0, wanted):
            raise ValueError(
                f"Some of the pieces {pieces.start} to {pieces.stop - 1} of batch {batch} are "
                "applied already and some are not. Push those that are missing, on their own."
            )
        return not wanted & applied

    def apply(self, batch: int, pieces: range) -> bool:
        """Count these pieces as applied; False, and nothing changed, if they were before.

        A server limits what a sender can make it remember by `may_begin`, which stays
        true for a batch once it was.
        """
        if not self.is_new(batch, pieces):
            return False
        self._applied[batch] = self._of(batch) | self._bits(batch, pieces)
        while self._applied.get(self.committed) == self._all:
            del self._applied[self.committed]
            self.committed += 1
        return True

    def may_begin(self, batch: int) -> bool:
        return self.bound is None or batch - self.committed <= self.bound

    def next_of(self, pieces_of: Callable[[int], range]) -> int:
        """Where a newcomer in a seat begins, whose pieces of a batch are `pieces_of(batch)`.

        The first batch from `committed` on of which they are not all applied; of a batch in which
        the seat has none, they are.
        """
        for batch in range(self.committed, max(self._applied, default=-1) + 1):
            pieces = pieces_of(batch)
            if pieces and self._bits(batch, pieces) & ~self._of(batch):
                return batch
        return max(self.committed, max(self._applied, default=-1) + 1)

    def to_plain(self) -> ClockRecord:
        """All there is to know of it, for a log and a checkpoint."""
        applied = [
            (batch, run.start, run.stop)
            for batch, bits in sorted(self._applied.items())
            for run in _runs(bits)
        ]
        return ClockRecord(self.num_pieces, self.bound, self.committed, applied)

    @classmethod
    def from_plain(cls, record: ClockRecord) -> "Clock":
        clock = cls(record.num_pieces, record.bound, record.committed)
        for batch, start, stop in record.applied:
            clock.apply(batch, range(start, stop))
        return clock

    def _of(self, batch: int) -> int:
        return self._all if batch < self.committed else self._applied.get(batch, 0)

    def _bits(self, batch: int, pieces: range) -> int:
        is_inside = 0 <= pieces.start < pieces.stop <= self.num_pieces and pieces.step == 1
        if not is_inside or batch < 0:
            raise ValueError(
                f"There is no {pieces} of batch {batch}. Batches count from 0, and pieces are a "
                f"run of neighbours among 0 to {self.num_pieces - 1}."
            )
        return ((1 << len(pieces)) - 1) << pieces.start


def _runs(bits: int) -> Iterator[range]:
    """The runs of ones, lowest first."""
    start = 0
    while bits >> start:
        rest = bits >> start
        start += (rest & -rest).bit_length() - 1
        ones = ~(bits >> start)
        stop = start + (ones & -ones).bit_length() - 1
        yield range(start, stop)
        start = stop


class Staleness:
    """How far ahead of what was committed batches were begun: how many, by how much.

    `histogram` is the whole of it, so one that was sent is made again from that.
    """

    def __init__(self, histogram: Mapping[int, int] | None = None):
        self.histogram: Counter[int] = Counter(histogram)

    @property
    def count(self) -> int:
        return self.histogram.total()

    @property
    def mean(self) -> float:
        total = sum(value * times for value, times in self.histogram.items())
        return total / self.count if self.count else 0.0

    @property
    def largest(self) -> int:
        return max(self.histogram, default=0)

    def add(self, value: int) -> None:
        self.histogram[value] += 1

    def merge(self, other: "Staleness") -> None:
        """Count in what another saw."""
        self.histogram.update(other.histogram)

    def summary(self) -> dict[str, Any]:
        """For events and reports."""
        return {
            "count": self.count,
            "mean": self.mean,
            "largest": self.largest,
            "histogram": dict(sorted(self.histogram.items())),
        }
