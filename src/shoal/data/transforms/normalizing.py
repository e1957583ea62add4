"""Normalisation: fields brought to mean 0 and deviation 1, or into the range from 0 to 1.

    shoal.data.normalized(pairs, {"inputs": 0})

The statistics are those of the whole source, measured once (`statistics.py`) or given, so every
rank and every world size scales alike, and evaluation data can be scaled as the training data were:

    train = shoal.data.normalized(rows, ["inputs"])
    held_out = shoal.data.normalized(others, statistics=train.statistics)

A column that is constant becomes 0. What is float64 stays so, anything else becomes float32; a
whole number in Python becomes a tensor. Cost: one operation a number each time that a sample is
met; samples are taken many at once where the source below can.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.data.sources import BatchSource, Ids, Pass
from shoal.data.transforms.fields import Field, field
from shoal.data.transforms.fingerprint import digest, identity_of
from shoal.data.transforms.statistics import (
    Fields,
    FieldStatistics,
    Statistics,
    axes_of,
    load_statistics,
)
from shoal.data.transforms.statistics import statistics as measured
from shoal.data.transforms.wrapped import WrappedSource, inner_sources
from shoal.errors import RecipeError, UsageError, nearest

To = Literal["standard", "range"]

_NARROW = {torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16}


class Normalized(WrappedSource):
    """Samples with scaled fields; made by `normalized`."""

    def __init__(self, source: Any, statistics: Statistics, names: list[str], to: To):
        super().__init__(source)
        self.statistics, self.names, self.to = statistics, names, to
        self._scales = [_Scale(field(name), statistics.fields[name], to) for name in names]
        if isinstance(source, BatchSource):
            self.take = self._take

    def _change(self, sample: Any, index: int, of: Pass) -> Any:
        try:
            for scale in self._scales:
                sample = scale.apply(sample)
        except RecipeError as error:
            raise RecipeError(f"sample {index} cannot be normalised: {error}") from error
        return sample

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        assert isinstance(self.source, BatchSource)
        inputs, target = self.source.take(ids)
        sample: tuple[Any, Any] = (inputs, target)
        for scale in self._scales:
            sample = scale.apply(sample, is_batch=True)
        return sample

    def identity(self) -> str:
        """Names this content: what lies below, and how it is scaled."""
        scales = [scale.place.name for scale in self._scales]
        parts = [repr(self.statistics.fields[name]) for name in scales]
        return digest("normalized", identity_of(self.source), scales, parts, self.to)


def normalized(
    source: Any,
    fields: Fields | None = None,
    statistics: Statistics | str | Path | None = None,
    *,
    to: To = "standard",
    workers: int = 1,
    identity: str | None = None,
) -> Normalized:
    """`source` with these fields scaled; by given statistics (or a file of them), or by its own.

    `fields` are names, or a dict from name to the dim whose indices are scaled apart; without it,
    all that the statistics are about. `to` is "standard" (mean 0, deviation 1) or "range" (0 to 1).
    `workers` and `identity` are about measuring.
    """
    if to not in ("standard", "range"):
        raise UsageError(f"to={to!r} is not known. {nearest(to, ('standard', 'range'))}")
    if isinstance(statistics, str | Path):
        statistics = load_statistics(statistics)
    if statistics is None:
        if fields is None:
            raise UsageError(
                "normalized() was given neither fields nor statistics. Name the fields, such as "
                '["inputs"].'
            )
        statistics = measured(source, fields, workers=workers, identity=identity)
    elif not isinstance(statistics, Statistics):
        raise UsageError(
            f"statistics={statistics!r}. Give those that shoal.data.statistics measured, or the "
            "path of a file of them."
        )
    elif workers != 1 or identity is not None:
        raise UsageError(
            "normalized() was given statistics, so it measures nothing, and workers= and identity= "
            "have no effect. Leave them out."
        )
    names = list(statistics.fields) if fields is None else list(axes_of(fields))
    for name in names:
        if name not in statistics.fields:
            raise UsageError(
                f"there are no statistics of {name!r}. {nearest(name, statistics.fields)}"
            )
        known = statistics.fields[name].axis
        if isinstance(fields, Mapping) and fields[name] != known:
            raise UsageError(
                f"{name!r} is to be scaled along dim {fields[name]}, and its statistics were "
                f"measured along dim {known}. Give {{{name!r}: {known}}}, or measure again."
            )
    return Normalized(source, statistics, names, to)


def save_run_statistics(data: Any, run_dir: Path) -> None:
    """Write what samples are normalised by into the run's directory, where it can be read later."""
    for number, found in enumerate(_statistics_in(data)):
        name = "statistics.json" if not number else f"statistics-{number + 1}.json"
        found.save(run_dir / name)


def _statistics_in(data: Any) -> Iterator[Statistics]:
    if isinstance(data, Normalized):
        yield data.statistics
    for source in inner_sources(data):
        yield from _statistics_in(source)


class _Scale:
    """How one field is scaled: minus `shift`, divided by `unit`."""

    def __init__(self, place: Field, of: FieldStatistics, to: To):
        self.place, self._axis = place, of.axis
        shift, unit = of.mean, of.std
        if to == "range":
            shift, unit = of.low, [high - low for low, high in zip(of.low, of.high, strict=True)]
        self._shift = torch.tensor(shift, dtype=torch.float64)
        self._unit = torch.tensor([part or 1.0 for part in unit], dtype=torch.float64)

    def apply(self, sample: Any, is_batch: bool = False) -> Any:
        value = self.place.get(sample)
        if isinstance(value, Tensor):
            new: Any = self._scaled(value, is_batch)
        elif isinstance(value, np.ndarray | np.generic):
            # A copy if it may not be written to, which torch would warn of.
            array = np.require(value, requirements="W")
            new = self._scaled(torch.from_numpy(np.asarray(array)), is_batch).numpy()
        elif isinstance(value, bool | int):
            new = self._scaled(torch.tensor(value), is_batch)
        elif isinstance(value, float):
            new = self._scaled(torch.tensor(value, dtype=torch.float64), is_batch).item()
        else:
            raise RecipeError(
                f"{self.place.name!r} is a {type(value).__name__}, which is no number"
            )
        return self.place.put(sample, new)

    def _scaled(self, value: Tensor, is_batch: bool) -> Tensor:
        shift, unit = self._shift, self._unit
        if self._axis is None:
            shift, unit = shift[0], unit[0]
        else:
            dims = value.dim() - is_batch
            if not -dims <= self._axis < dims or value.shape[is_batch:][self._axis] != len(shift):
                raise RecipeError(
                    f"{self.place.name!r} has the shape {list(value.shape[is_batch:])}, and the "
                    f"statistics are about {len(shift)} along dim {self._axis}"
                )
            form = [1] * dims
            form[self._axis] = -1
            shift, unit = shift.view(form), unit.view(form)
        # Whole numbers with more digits than float32 has are scaled before they are rounded.
        working = torch.float32 if value.dtype in _NARROW else torch.float64
        result = value.to(working).sub(shift.to(working)).div_(unit.to(working))
        return result if value.dtype == torch.float64 else result.float()
