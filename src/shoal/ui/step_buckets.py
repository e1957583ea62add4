"""The steps of a run in a bounded number of buckets, each with sums, least and largest values.

A bucket covers `width` steps. When there are more than `MOST_BUCKETS`, the width doubles and pairs
become one: a run of any length is held in the same memory, and a curve drawn from it shows its
peaks, since every bucket knows its extremes. Blocks of lines are reduced column by column with the
interpreter's own sums, so numpy is not needed, and a hundred thousand steps take about a third of
a second. Pure, but for the clock of runs whose record has no times.

Read next: `run_reader.py`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

MOST_BUCKETS = 1024
MOST_NAMES = 48  # of values that a recipe or its callbacks log


class StepSeconds(msgspec.Struct, frozen=True, gc=False):
    """The seconds of a step on the rank that writes the record."""

    data: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.data + self.compute + self.exchange + self.waiting


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """What is read of a line of metrics.jsonl; older versions have fewer fields."""

    step: int
    loss: float | None = None
    samples: int = 0
    rate: float | None = None
    norm: float | None = None
    bytes_sent: int = 0
    left_out: int = 0
    time: float = 0.0
    times: StepSeconds = StepSeconds()
    parts: dict[str, float | None] = {}
    logged: dict[str, float | None] = {}
    evaluation: dict[str, float | None] | None = None


class Extent:
    """The sum, number, least and largest of some values."""

    __slots__ = ("count", "high", "low", "total")

    def __init__(self, values: Sequence[float]):
        self.total, self.count = math.fsum(values), len(values)
        self.low, self.high = min(values), max(values)

    def add(self, other: "Extent") -> None:
        self.total, self.count = self.total + other.total, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    @property
    def mean(self) -> float:
        return self.total / self.count


KINDS = ("data", "compute", "exchange", "waiting")


class Bucket:
    """The sums of a stretch of steps; `seconds` are of the rank that writes the record."""

    __slots__ = (
        *("begin", "bytes_sent", "end", "extents", "first", "last", "num_steps", "samples"),
        "seconds",
    )

    def __init__(self, rows: Sequence[StepRow], begins: Sequence[float]):
        self.num_steps, self.first, self.last = len(rows), rows[0].step, rows[-1].step
        times = [row.times for row in rows]
        self.seconds = [
            math.fsum([one.data for one in times]),
            math.fsum([one.compute for one in times]),
            math.fsum([one.exchange for one in times]),
            math.fsum([one.waiting for one in times]),
        ]
        self.begin, self.end = begins[0], begins[-1] + times[-1].total
        self.samples = sum([row.samples - row.left_out for row in rows])
        self.bytes_sent = sum([row.bytes_sent for row in rows])
        self.extents = {name: Extent(values) for name, values in _columns(rows).items() if values}

    def add(self, other: "Bucket") -> None:
        """Take in the bucket after this one."""
        self.num_steps += other.num_steps
        self.last, self.end = other.last, other.end
        self.seconds = [a + b for a, b in zip(self.seconds, other.seconds)]
        self.samples += other.samples
        self.bytes_sent += other.bytes_sent
        for name, extent in other.extents.items():
            if name in self.extents:
                self.extents[name].add(extent)
            else:
                self.extents[name] = extent


class StepBuckets:
    """All steps of a run, in buckets. Give it rows in the order of their steps."""

    def __init__(self, num_steps: int = 0):
        self.width = 1
        self._first, self._foretold = 0, num_steps
        self.buckets: list[Bucket] = []
        self.names: dict[str, None] = {}  # of curves, in the order in which they came
        self.last: StepRow | None = None
        self.is_cut = False  # some names have no curve, for there are too many
        self._clock = 0.0

    def add(self, rows: Iterable[StepRow], starts: dict[int, float]) -> None:
        """`starts` has the times at which work began after a step, for records without times."""
        kept = list(self._in_order(rows))
        if not kept:
            return
        self._first = self._first or kept[0].step
        self._widen(max(kept[-1].step, self._foretold))
        begins = [self._begin(row, starts) for row in kept]
        numbers = [(row.step - self._first) // self.width for row in kept]
        cuts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if a != b), len(kept)]
        for first, last in pairwise(cuts):
            self._put(Bucket(kept[first:last], begins[first:last]))
        self.last = kept[-1]

    def _in_order(self, rows: Iterable[StepRow]) -> Iterator[StepRow]:
        """Leave out what cannot be a step, and what was recorded before."""
        last = self.last.step if self.last is not None else 0
        for row in rows:
            if last < row.step < 2**53:
                last = row.step
                yield row

    def _begin(self, row: StepRow, starts: dict[int, float]) -> float:
        """When a step began: by its record, or after the one before it."""
        took = row.times.total
        if row.time:
            self._clock = row.time
            return row.time - took
        begin = max(self._clock, starts.get(row.step - 1, 0.0))
        self._clock = begin + took
        return begin

    def _put(self, bucket: Bucket) -> None:
        for name in [name for name in bucket.extents if name not in self.names]:
            if len(self.names) < MOST_NAMES:
                self.names[name] = None
            else:
                del bucket.extents[name]
                self.is_cut = True
        if self.buckets and self._number(self.buckets[-1]) == self._number(bucket):
            self.buckets[-1].add(bucket)
        else:
            self.buckets.append(bucket)

    def _widen(self, last: int) -> None:
        """Make buckets so wide that there is room for all steps up to the last."""
        before = self.width
        while last - self._first >= self.width * MOST_BUCKETS:
            self.width *= 2
        if self.width != before:
            self.buckets = merged(self.buckets, self._number)

    def _number(self, bucket: Bucket) -> int:
        return (bucket.first - self._first) // self.width


def merged(buckets: Iterable[Bucket], number: Any) -> list[Bucket]:
    """Neighbours of one number become one."""
    kept: list[Bucket] = []
    for bucket in buckets:
        if kept and number(kept[-1]) == number(bucket):
            kept[-1].add(bucket)
        else:
            kept.append(bucket)
    return kept


def _columns(rows: Sequence[StepRow]) -> dict[str, list[float]]:
    """The values of each curve; those that are not finite have no place on it."""
    found: dict[str, list[float]] = {
        "loss": [row.loss for row in rows if row.loss is not None],
        "rate": [row.rate for row in rows if row.rate is not None],
        "norm": [row.norm for row in rows if row.norm is not None],
    }
    for row in rows:
        if not (row.parts or row.logged or row.evaluation):
            continue
        for group, values in (
            ("parts", row.parts),
            ("logged", row.logged),
            ("evaluation", row.evaluation or {}),
        ):
            for name, value in values.items():
                if value is not None:
                    found.setdefault(f"{group}/{name}", []).append(value)
    return {
        name: [value for value in values if math.isfinite(value)] for name, values in found.items()
    }
