"""A batch that is filled row by row, so that a sample's buffer is free again before the next comes.

What comes out equals the samples collated at once (`sources.collate_samples`), for samples whose
inputs and target are tensors, arrays or numbers, or a tuple or dict of them. Any others are not
taken, and their caller collates them. Cost: one copy of each sample, from a buffer that is still
in the processor's cache; collating a list of samples has all of them in memory first.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Column: TypeAlias = Tensor | list[int] | list[float]


class Unlike(Exception):
    """A sample that does not go into such a batch."""


class Rows:
    """The rows of one batch; the first sample that is placed says what they look like."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._form: list[Any] = []
        self._columns: list[Column] = []

    def place(self, row: int, sample: Any) -> None:
        """Copy a sample into its row; Unlike if it has not the form of the first."""
        leaves: list[Any] = []
        form = _form_of(sample, leaves)
        if not self._columns:
            self._form = form
            self._columns = [_column(leaf, self._num_rows) for leaf in leaves]
        elif form != self._form:
            raise Unlike
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[row] = leaf

    def pair(self) -> tuple[Any, Any]:
        """Inputs and target, once every row is placed."""
        tensors = map(_tensor_of_column, self._columns)
        inputs, target = (self._part(kind, names, tensors) for kind, names in self._form[:2])
        return inputs, target

    def _part(self, kind: str, names: list[str], tensors: Iterator[Tensor]) -> Any:
        if kind == "leaf":
            return next(tensors)
        if kind == "dict":
            return {name: next(tensors) for name in names}
        return tuple(next(tensors) for _ in names)


def _form_of(sample: Any, leaves: list[Any]) -> list[Any]:
    """Kind and names of both parts, then shape and type of each leaf; the leaves go into a list."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise Unlike
    parts: list[Any] = []
    for part in sample:
        if isinstance(part, Mapping):
            parts.append(("dict", list(part)))
            leaves.extend(part.values())
        elif isinstance(part, tuple | list):
            parts.append(("tuple", list(range(len(part)))))
            leaves.extend(part)
        else:
            parts.append(("leaf", []))
            leaves.append(part)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            leaves[at] = leaf = _tensor_of(leaf)
        if isinstance(leaf, Tensor):
            parts.append((leaf.shape, leaf.dtype))
        elif type(leaf) in (int, float):
            parts.append(type(leaf))
        else:
            raise Unlike
    return parts


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # a type that torch has not, which collating says in words
        raise Unlike from None


def _tensor_of_column(column: Column) -> Tensor:
    if isinstance(column, Tensor):
        return column
    return torch.tensor(column, dtype=torch.float64 if type(column[0]) is float else torch.int64)


def _column(leaf: Any, num_rows: int) -> Column:
    if isinstance(leaf, Tensor):
        return torch.empty((num_rows, *leaf.shape), dtype=leaf.dtype)
    return [leaf] * num_rows
