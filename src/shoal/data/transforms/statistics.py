"""Statistics of a source's fields: mean, standard deviation, least, largest, count, quantiles.

    shoal.data.statistics(rows, ["age", "height"])
    shoal.data.statistics(pairs, {"inputs": 0})          # one for each index along dim 0 of inputs

Sums are exact integers until the last division (`exact_sum.py`), so the result has the same bits
for any number of workers, shares and orders. Quantiles are counted in buckets that are cut from the
bits of a number, and are right to 0.2 % of its size. `measure` and `merge_statistics` are the
parts, for those who divide the work themselves.

Computed once, kept in the cache directory, and written to a path with `save` to go with a model.
Not for varied samples: `source[i]` is measured. Cost: one pass over the source.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.sources import Source, as_source, raise_of_sample
from shoal.data.transforms.exact_sum import ExactSum, Floats, squares
from shoal.data.transforms.fields import Field, field
from shoal.data.transforms.fingerprint import result_key
from shoal.data.transforms.jobs import PassJob, run_job
from shoal.data.transforms.wrapped import iterate_loads
from shoal.data.validate import numbers_of, path_of
from shoal.errors import RecipeError, UsageError
from shoal.storage.decoding import decode_json
from shoal.storage.files import read_regular_file, write_atomic

Fields: TypeAlias = Sequence[str] | Mapping[str, int | None]

_FLUSH = 1 << 18  # numbers that are collected before they are added
_NARROW = {np.dtype(kind) for kind in ("u1", "i1", "u2", "i2", "f2", "f4", "?")}
_SHIFT = 44  # of 64 bits: sign, 11 of the exponent and 8 of the digits remain
_CODES = 1 << 20


class FieldStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one field. Lists have an entry for each index along `axis`, or one if it is None."""

    axis: int | None
    count: int  # numbers that went into each entry
    mean: list[float]
    std: list[float]  # of all that was measured, not an estimate for more
    low: list[float]
    high: list[float]
    quantiles: dict[str, list[float]] = {}


class Statistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the fields of a source."""

    num_samples: int
    fields: dict[str, FieldStatistics]

    def save(self, path: str | Path) -> None:
        """Write to a JSON file, all or nothing."""
        path = path_of(path, "save()")
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        try:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(path), text + b"\n")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def load_statistics(path: str | Path) -> Statistics:
    """What `save` wrote."""
    path = path_of(path, "load_statistics()")
    try:
        content = read_regular_file(Path(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    what, way_out = f"{path} holds no statistics: it", "Measure them again."
    found = decode_json(content, Statistics, what, way_out=way_out)
    for name, of in found.fields.items():
        lists = [of.mean, of.std, of.low, of.high, *of.quantiles.values()]
        if not of.mean or len({len(part) for part in lists}) != 1 or min(of.std) < 0:
            raise UsageError(f"{path} holds no statistics: {name!r} has entries that do not fit.")
    return found


def statistics(
    source: Any,
    fields: Fields,
    *,
    quantiles: Sequence[float] = (),
    workers: int = 1,
    identity: str | None = None,
) -> Statistics:
    """Measure fields of a source: names, or a dict from name to the dim that is kept apart.

    `identity` names the content of a source that does not do so itself, so that the result is kept.
    """
    source, axes = as_source(source), axes_of(fields)
    if not len(source):
        raise UsageError("statistics() was given an empty source: len(source) is 0.")
    quantiles = numbers_of(quantiles, "statistics(quantiles=...)").tolist()
    if not all(0 <= part <= 1 for part in quantiles):
        raise UsageError(f"quantiles={list(quantiles)}. Each is a share from 0 to 1.")
    key = result_key("statistics", source, identity, axes, list(quantiles))

    def work(share: range) -> bytes:
        return measure(source, axes, share, bool(quantiles)).packed()

    def merge(parts: list[bytes]) -> bytes:
        return msgspec.json.encode(merge_statistics(map(PartialStatistics.of, parts), quantiles))

    content = run_job(PassJob("statistics", key, len(source), work, merge), workers)
    return msgspec.json.decode(content, type=Statistics)


def axes_of(fields: Fields) -> dict[str, int | None]:
    """Fields in one form: the dim of each that is kept apart."""
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise UsageError(
            f"fields={fields!r}. Give a list, or a dict from field to dim: [{fields!r}]"
        )
    axes = dict(fields) if isinstance(fields, Mapping) else dict.fromkeys(fields)
    if not axes:
        raise UsageError("fields is empty. Name at least one, such as inputs.")
    return {field(name).name: axis for name, axis in axes.items()}


class PartialStatistics:
    """What was found out about some samples. Merged in any order, it gives the same statistics."""

    def __init__(self, num_samples: int, fields: dict[str, "_FieldTally"]):
        self.num_samples, self.fields = num_samples, fields

    def merge(self, other: Self) -> None:
        self.num_samples += other.num_samples
        for name, tally in other.fields.items():
            self.fields[name].merge(tally, name)

    def packed(self) -> bytes:
        """As bytes, to be sent or kept."""
        parts = {name: tally.packed() for name, tally in self.fields.items()}
        return msgspec.json.encode([self.num_samples, parts])

    @classmethod
    def of(cls, packed: bytes) -> Self:
        """What was packed."""
        num_samples, parts = msgspec.json.decode(packed)
        return cls(num_samples, {name: _FieldTally.of(part) for name, part in parts.items()})


def measure(
    source: Source, axes: Mapping[str, int | None], share: range, with_quantiles: bool = False
) -> PartialStatistics:
    """Measure some samples of a source."""
    tallies = {name: _FieldTally(axis, with_quantiles) for name, axis in axes.items()}
    places = [(field(name), tally) for name, tally in tallies.items()]
    for index, load in iterate_loads(source, share):
        try:
            sample = load()
            for place, tally in places:
                tally.collect(_numbers(place, sample, tally.axis))
        except RecipeError as error:
            raise RecipeError(f"sample {index} cannot be measured: {error}") from error
        except BaseException as error:  # noqa: BLE001 (it is raised)
            raise_of_sample(index, error, f"sample {index} cannot be measured")
    for tally in tallies.values():
        tally.flush()
    return PartialStatistics(len(share), tallies)


def merge_statistics(
    parts: Iterator[PartialStatistics], quantiles: Sequence[float] = ()
) -> Statistics:
    """The statistics of samples that were measured in parts."""
    first, *others = parts
    for other in others:
        first.merge(other)
    found = {name: tally.statistics(quantiles) for name, tally in first.fields.items()}
    return Statistics(first.num_samples, found)


class _FieldTally:
    """Sums, extremes and counts of one field, column by column."""

    def __init__(self, axis: int | None, with_quantiles: bool):
        self.axis, self.with_quantiles = axis, with_quantiles
        self.count = 0  # rows
        self.sum, self.squares = ExactSum(0), ExactSum(0)
        self.low, self.high = np.empty(0), np.empty(0)
        self.codes, self.counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._rows: list[NDArray[Any]] = []
        self._num_collected = 0

    def collect(self, rows: NDArray[Any]) -> None:
        """Numbers of one sample, [any number, columns]."""
        columns = self._rows[0].shape[1] if self._rows else self.sum.num_columns
        if columns and rows.shape[1] != columns:
            raise RecipeError(f"it has {rows.shape[1]} along dim {self.axis}, others {columns}")
        self._rows.append(rows)
        self._num_collected += rows.size
        if self._num_collected >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Add what was collected."""
        if not self._num_collected:
            return
        given = np.concatenate(self._rows)
        self._rows, self._num_collected = [], 0
        rows = given.astype(np.float64) + 0.0  # makes -0 an 0, which has one least and one largest
        if not self.count:
            width = rows.shape[1]
            self.sum, self.squares = ExactSum(width), ExactSum(width)
            self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)
        self.count += len(rows)
        self.sum.add(rows)
        product, lost = squares(rows)
        self.squares.add(product)
        if given.dtype not in _NARROW:  # of the narrow ones a square is exact
            self.squares.add(lost)
        self.low = np.minimum(self.low, rows.min(axis=0))
        self.high = np.maximum(self.high, rows.max(axis=0))
        if self.with_quantiles:
            codes = _codes(rows) + np.arange(rows.shape[1]) * _CODES
            self._count(codes.reshape(-1), np.ones(codes.size, np.int64))

    def _count(self, codes: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        codes, where = np.unique(np.concatenate([self.codes, codes]), return_inverse=True)
        sums = np.zeros(len(codes), np.int64)
        np.add.at(sums, where, np.concatenate([self.counts, counts]))
        self.codes, self.counts = codes, sums

    def merge(self, other: "_FieldTally", name: str) -> None:
        if not other.count:
            return
        if not self.count:
            vars(self).update(vars(other))
            return
        if self.sum.num_columns != other.sum.num_columns:
            raise RecipeError(
                f"samples have {self.sum.num_columns} and {other.sum.num_columns} along dim "
                f"{self.axis} of {name!r}. It must be the same in all; use None to measure it as "
                "a whole."
            )
        self.count += other.count
        self.sum.merge(other.sum)
        self.squares.merge(other.squares)
        self.low = np.minimum(self.low, other.low)
        self.high = np.maximum(self.high, other.high)
        self._count(other.codes, other.counts)

    def statistics(self, quantiles: Sequence[float]) -> FieldStatistics:
        if not self.count:
            raise RecipeError("a field has no numbers in any sample, so it has no statistics")
        pairs = list(zip(self.sum.totals(), self.squares.totals(), strict=True))
        variances = [(square - total * total / self.count) / self.count for total, square in pairs]
        return FieldStatistics(
            axis=self.axis,
            count=self.count,
            mean=[float(total / self.count) for total, _ in pairs],
            std=[math.sqrt(max(variance, Fraction(0))) for variance in variances],
            low=self.low.tolist(),
            high=self.high.tolist(),
            quantiles={repr(float(share)): self._quantile(share) for share in quantiles},
        )

    def _quantile(self, share: float) -> list[float]:
        found = []
        rank = int(share * (self.count - 1))
        for column, (low, high) in enumerate(zip(self.low, self.high)):
            start, stop = np.searchsorted(self.codes, [column * _CODES, (column + 1) * _CODES])
            at = np.searchsorted(np.cumsum(self.counts[start:stop]), rank, side="right")
            value = _middle(int(self.codes[start + at]) - column * _CODES)
            found.append(float(min(max(value, low), high)))
        return found

    def packed(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "count": self.count,
            "sums": [self.sum.packed(), self.squares.packed()],
            "extremes": [self.low.tolist(), self.high.tolist()],
            "codes": [self.codes.tolist(), self.counts.tolist()],
        }

    @classmethod
    def of(cls, packed: dict[str, Any]) -> Self:
        made = cls(packed["axis"], bool(packed["codes"][0]))
        made.count = packed["count"]
        made.sum, made.squares = map(ExactSum.of, packed["sums"])
        made.low, made.high = (np.array(part, np.float64) for part in packed["extremes"])
        made.codes, made.counts = (np.array(part, np.int64) for part in packed["codes"])
        return made


def _numbers(place: Field, sample: Any, axis: int | None) -> NDArray[Any]:
    """The numbers of a field, [any number, columns]; each is checked to be finite."""
    value = place.get(sample)
    if isinstance(value, Tensor):
        value = value.detach()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "fiub":
        raise RecipeError(f"{place.name!r} is a {type(value).__name__}, which is no number")
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise RecipeError(
            f"{place.name!r} holds a number that is not finite. Clean the source first: a range in "
            "a schema refuses it"
        )
    if axis is None:
        return numbers.reshape(-1, 1)
    if not -numbers.ndim <= axis < numbers.ndim:
        raise RecipeError(f"{place.name!r} has {numbers.ndim} dims, and dim {axis} was asked for")
    return np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])


def _codes(numbers: Floats) -> NDArray[np.int64]:
    """The bucket of each number, from 0 on: larger numbers have larger ones."""
    bits = numbers.view(np.int64)
    ordered = bits ^ ((bits >> 63) & np.int64(0x7FFF_FFFF_FFFF_FFFF))
    return (ordered >> _SHIFT) + _CODES // 2


def _middle(code: int) -> float:
    """The number in the middle of a bucket."""
    ordered = ((code - _CODES // 2) << _SHIFT) + (1 << (_SHIFT - 1))
    bits = np.int64(ordered if ordered >= 0 else ordered ^ 0x7FFF_FFFF_FFFF_FFFF)
    return float(bits.view(np.float64))
