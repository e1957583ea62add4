"""Pairs for training out of columns: some are the inputs, some the target, gathered at once.

For tables that hold numbers ready to train on there is nothing to map: name the columns, and a
whole batch is one gather and no Python for each sample. `inputs="x"` gives a tensor, a list of
names a tuple, a dict of argument names and columns a dict; so does `target`.

Lists must have one length in all rows, and nothing may be null: which sample breaks that is named.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.orders import order_of
from shoal.data.readers.records import BadRecord, name_content, position, require_columns
from shoal.data.sources import Ids, map_tensors

Choice: TypeAlias = str | Sequence[str] | Mapping[str, str]


class Irregular(Exception):
    """Values that do not make one array; the message says why."""


class Columnar(Protocol):
    """A source whose columns can be had as arrays, one row for each id."""

    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def __str__(self) -> str: ...

    def identity(self) -> str: ...

    def arrays(self, ids: Ids, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Raises `Irregular` when some column of these rows is no array."""


class ColumnPairs:
    """Pairs `(inputs, target)` from the columns of a table."""

    def __init__(self, table: Columnar, inputs: Choice, target: Choice):
        self._table, self._inputs, self._target = table, inputs, target
        self._names = sorted({*names_in(inputs), *names_in(target)})
        require_columns(self._names, table.columns, str(table))
        self.order = order_of(table)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        pair = self.take(np.array([position(index, len(self))], dtype=np.int64))

        def row(tensor: Tensor) -> Tensor:
            return tensor[0]

        return map_tensors(row, pair[0]), map_tensors(row, pair[1])

    def identity(self) -> str:
        return name_content(self._table.identity(), self._inputs, self._target)

    def take(self, ids: Ids) -> tuple[Any, Any]:
        """The collated samples."""
        try:
            arrays = self._table.arrays(ids, self._names)
        except Irregular as error:
            self._name_the_sample(ids, error)
        tensors = {name: torch.from_numpy(_owned(array)) for name, array in arrays.items()}
        return chosen(self._inputs, tensors), chosen(self._target, tensors)

    def _name_the_sample(self, ids: Ids, error: Irregular) -> NoReturn:
        """Say which sample is the odd one; each by itself may be an array, of another shape."""
        shapes: dict[str, list[int]] = {}
        for index in ids:
            try:
                arrays = self._table.arrays(np.array([index], dtype=np.int64), self._names)
            except Irregular as own:
                raise BadRecord(f"{self._table} (sample {index}): {own}") from None
            for name, array in arrays.items():
                shape = shapes.setdefault(name, list(array.shape[1:]))
                if shape != list(array.shape[1:]):
                    raise BadRecord(
                        f"{self._table}: column {name!r} of sample {index} has the shape "
                        f"{list(array.shape[1:])}, and of sample {ids[0]} {shape}. Samples of a "
                        "batch must be alike; map the records by a function that pads them."
                    ) from None
        raise BadRecord(f"{self._table}: {error}") from None


def names_in(choice: Choice) -> list[str]:
    """The columns that a choice names."""
    if isinstance(choice, str):
        return [choice]
    return list(choice.values() if isinstance(choice, Mapping) else choice)


def chosen(choice: Choice, values: Mapping[str, Any]) -> Any:
    """The values of a choice: one, a tuple or a dict."""
    if isinstance(choice, str):
        return values[choice]
    if isinstance(choice, Mapping):
        return {name: values[column] for name, column in choice.items()}
    return tuple(values[name] for name in choice)


def _owned(array: NDArray[Any]) -> NDArray[Any]:
    """An array that may be written to; what Arrow holds may not."""
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()
