"""Augmentation of rows of numbers: noise, dropped features, features of other rows.

    from shoal.data.transforms import tabular
    data = shoal.data.mapped(pairs, shoal.data.on("inputs", partial(tabular.noise, scale=0.05)))

A row is a 1-D array or tensor of floats, one number a feature; what comes out is of the same kind
and type. Each function is pure in the row and the generator that it is given: `swap` takes its
other rows from a table that is the same for all samples, and mixing two samples (mixup) belongs
into the loss, where a batch is at hand.

Not for columns of words or classes. Cost: a few draws a feature. Paper: Vincent et al., "Extracting
and composing robust features with denoising autoencoders", 2008.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.transforms.randomness import Random, require_probability
from shoal.errors import RecipeError, UsageError

Row = TypeVar("Row", NDArray[Any], Tensor)


def noise(row: Row, random: Random, *, scale: float | Sequence[float] = 0.1) -> Row:
    """Add gaussian noise of this standard deviation: one for all features, or one for each."""
    spread = np.asarray(scale, np.float64)
    if spread.ndim > 1 or not (spread >= 0).all():
        raise UsageError(f"scale={scale}. It is a number from 0 on, or one for each feature.")

    def change(values: NDArray[Any]) -> NDArray[Any]:
        _require_one_each("scales", spread, values)
        return values + random.standard_normal(len(values)) * spread

    return _changed(row, change)


def drop(
    row: Row, random: Random, *, chance: float = 0.1, fill: float | Sequence[float] = 0.0
) -> Row:
    """Replace each feature by `fill`, one for all or one for each, with this chance."""
    require_probability(chance)
    filling = np.asarray(fill, np.float64)

    def change(values: NDArray[Any]) -> NDArray[Any]:
        _require_one_each("fills", filling, values)
        return np.where(random.random(len(values)) < chance, filling, values)

    return _changed(row, change)


def swap(row: Row, random: Random, *, table: NDArray[Any], chance: float = 0.1) -> Row:
    """Replace each feature, with this chance, by that feature of a row of `table`, drawn for it.

    The table, [rows, features], is a fixed part of the data, such as a thousand rows of it.
    """
    require_probability(chance)
    if table.ndim != 2 or not len(table):
        raise UsageError(f"table has the shape {list(table.shape)}. It is [rows, features].")

    def change(values: NDArray[Any]) -> NDArray[Any]:
        _require_one_each("columns", table[0], values)
        chosen = random.random(len(values)) < chance
        others = table[random.integers(len(table), size=len(values)), np.arange(len(values))]
        return np.where(chosen, others, values)

    return _changed(row, change)


def _changed(row: Row, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Row:
    values = row.detach().numpy() if isinstance(row, Tensor) else row
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind != "f":
        is_array = isinstance(values, np.ndarray)
        shown = f"{values.dtype} {list(values.shape)}" if is_array else f"a {type(row).__name__}"
        raise RecipeError(f"{shown} is no row of features. It must be a 1-D array of floats")
    result = change(values).astype(values.dtype)
    return torch.from_numpy(result) if isinstance(row, Tensor) else result


def _require_one_each(what: str, given: NDArray[Any], values: NDArray[Any]) -> None:
    if given.ndim and len(given) != len(values):
        raise RecipeError(f"{len(given)} {what} for {len(values)} features. Give one for each")
