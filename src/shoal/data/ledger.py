"""The ledger: which samples went into which committed step, and whether they were the right ones.

The order of samples is a pure function, so a ledger need not list them. Every rank marks the ids
that it really loaded with a number; the marks of all ranks are added up in the message that commits
the step, and the sum is written beside the step's loss. `audit` makes the same number from the
order alone. A sample lost, repeated or swapped on any rank changes it, whatever the number of ranks
and pieces was; that two sets of samples have one mark by chance has odds of 1 in 2**53.

Cost: one double a rank in a message that is sent anyway, some 30 bytes a step on disk.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, combinations, islice
from typing import Any

import msgspec
import numpy as np

from shoal.data.batches import Batches
from shoal.data.marks import MODULUS, mark
from shoal.data.permutation import Ids
from shoal.data.sources import Source, stream_of

_MOST_TRIES = 1000
_MOST_COUNTED = 1 << 29  # samples that are counted one by one: 4 GiB


def mark_samples(source: Source, ids: Ids) -> int:
    """The mark of some samples; of a stream, where a position may hold anything, their content
    counts too."""
    stream = stream_of(source)
    return mark(ids if stream is None else stream.keys(ids))


def add_marks(marks: Iterable[int | float]) -> int:
    return sum(map(int, marks)) % MODULUS


class Audit(msgspec.Struct):
    """What a run's record says of its samples."""

    first_step: int = 0
    last_step: int = 0
    num_samples: int = 0  # trained on, each as often as it was
    num_marked: int = 0  # steps whose mark was compared with the order
    num_wrong: int = 0  # steps whose mark is that of other samples
    num_unmarked: int = 0  # steps for which none was kept, or of which no file tells who was out
    num_left_out: int = 0  # samples in quarantine
    passes: float = 0.0
    most_often: int = 0  # how often the sample was trained on that came most
    least_often: int = 0
    problems: list[str] = msgspec.field(default_factory=list)
    is_stream: bool = False  # then no sample has a number that comes again


def audit(
    records: Iterable[Mapping[str, Any]], batches: Batches, left_out: Collection[int] = ()
) -> Audit:
    """Compare the record of a run's steps with the order of its samples."""
    stream = stream_of(batches.source)
    found, counts = Audit(is_stream=stream is not None), _VisitCounts(len(batches.source))
    out = np.asarray(sorted(left_out), dtype=np.int64)
    marks: list[int] = []  # of the steps since one that has a mark on record
    num_unnamed = num_unknown = 0
    for record in records:
        step = int(record["step"])
        if found.last_step and step != found.last_step + 1:
            found.problems.append(_gap(found.last_step, step))
        found.first_step, found.last_step = found.first_step or step, step
        whole = batches.at(step - 1).ids
        ids = _loaded(whole, out, record)
        found.num_left_out += len(whole) - len(ids)
        of_step = max(0, record.get("left_out", 0) - (len(whole) - len(ids)))
        num_unnamed, num_unknown = num_unnamed + of_step, num_unknown + of_step
        counts.add(ids)
        found.num_samples += len(ids)
        marks.append(mark_samples(batches.source, ids))
        if record.get("mark") is None:
            continue
        since, num_told = len(marks), _num_covered(marks, int(record["mark"]))
        if num_told:
            found.num_marked += num_told
            found.num_unmarked += since - num_told
        elif num_unnamed:  # by no file: there is nothing to compare with
            found.num_unmarked += since
        else:
            found.num_wrong += since
            of = f"step {step}" if since == 1 else f"steps {step - since + 1} to {step}"
            found.problems.append(f"{of}: other samples were trained on than the order gives")
        marks, num_unnamed = [], 0
    found.num_unmarked += len(marks)
    if stream is not None and not stream.is_lasting and found.num_wrong and not found.num_marked:
        found.num_unmarked, found.num_wrong = found.num_unmarked + found.num_wrong, 0
        found.problems = [
            "the log does not begin with the entry that this run began with, which its broker has "
            "dropped, so no step can be compared"
        ]
    found.num_samples -= num_unknown
    found.passes = found.num_samples / max(1, batches.num_samples)
    # Of those that were left out and no file names, each may have been the one that came least.
    found.most_often, least_often = counts.most_and_least()
    found.least_often = max(0, least_often - num_unknown)
    return found


class _VisitCounts:
    """How often each sample came: a number each, or those that came where there are too many."""

    def __init__(self, num_samples: int):
        self._num_samples = num_samples
        is_small = num_samples <= _MOST_COUNTED
        self._counts = np.zeros(num_samples, dtype=np.int64) if is_small else None
        self._met: list[Ids] = []

    def add(self, ids: Ids) -> None:
        if self._counts is None:
            self._met.append(ids)
        else:
            np.add.at(self._counts, ids, 1)  # a batch may hold a sample twice

    def most_and_least(self) -> tuple[int, int]:
        if self._counts is not None:
            return int(self._counts.max()), int(self._counts.min())
        ids = np.concatenate([np.empty(0, dtype=np.int64), *self._met])
        numbers = np.unique(ids, return_counts=True)[1]
        least = numbers.min() if len(numbers) == self._num_samples else 0
        return int(numbers.max(initial=0)), int(least)


def _num_covered(marks: Sequence[int], told: int) -> int:
    """How many of these steps, the last ones, a mark on record is of; 0 if of none.

    Of all, unless the run resumed in between from a checkpoint whose step has no mark: within a
    window of local steps, or under a plan that keeps none.
    """
    sums = accumulate(reversed(marks), lambda *pair: add_marks(pair))
    return max((number for number, own in enumerate(sums, 1) if own == told), default=0)


def skipped_ids(ids: Ids, named_bad: Ids, record: Mapping[str, Any]) -> Ids:
    """Of the samples of a step those that it left out, as far as its mark proves it."""
    kept = _loaded(ids, named_bad, record)
    return ids[~np.isin(ids, kept)] if mark(kept) == record.get("mark") else ids[:0]


def _loaded(ids: Ids, out: Ids, record: Mapping[str, Any]) -> Ids:
    """Of the samples of a step those that it was made of, without as many as were left out.

    Of those that are named bad not all need be: a sample may fail in one pass, and not in another.
    """
    if not out.size:
        return ids
    named = ids[np.isin(ids, out)]
    for left in islice(combinations(named.tolist(), record.get("left_out", 0)), _MOST_TRIES):
        kept = ids[~np.isin(ids, left)]
        if mark(kept) == record.get("mark"):
            return kept
    return ids[~np.isin(ids, out)]


def _gap(before: int, after: int) -> str:
    if after <= before:
        return f"step {after} is on record after step {before}"
    return f"between step {before} and step {after} nothing is on record"
