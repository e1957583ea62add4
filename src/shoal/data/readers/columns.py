"""Pairs for training out of columns: some are the inputs, some the target, gathered at once.

For tables that hold numbers ready to train on there is nothing to map: name the columns, and a
whole batch is one gather and no Python for each sample. `inputs="x"` gives a tensor, a list of
names a tuple, a dict of argument names and columns a dict; so does `target`.

Lists must have one length in all rows, and nothing may be null: which sample breaks that is named.

The second half makes arrays and plain values of Arrow's columns, with the types that they have.
Numbers, and lists of numbers nested to any depth, become numpy arrays; anything else becomes what
Python has for it. Nulls stay None in a record, and make a column of numbers irregular: a NaN in
their place would change the type of the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.orders import order_of
from shoal.data.readers.records import (
    BadRecord,
    Indices,
    hash_parts,
    normalize_indices,
    require_columns,
)
from shoal.data.sources import Ids, map_tensors, normalize_index
from shoal.data.transforms.fingerprint import identity_of
from shoal.errors import UsageError, require

ColumnChoice: TypeAlias = str | Sequence[str] | Mapping[str, str]


class Irregular(Exception):
    """Values that do not make one array; the message says why."""


class ColumnSource:
    """Rows by index whose columns can be had as arrays; tables of all kinds inherit this."""

    columns: tuple[str, ...]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.many([index])[0]

    def many(self, ids: Indices) -> list[dict[str, Any]]:
        """Many rows, by few questions."""
        raise NotImplementedError

    def arrays(self, ids: Ids, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Columns of some rows; raises `Irregular` when one of them is no array."""
        raise NotImplementedError

    def unfit(self, name: str) -> str | None:
        """What a column holds, if that is no numbers and cannot be an array."""
        return None

    def pairs(self, inputs: ColumnChoice, target: ColumnChoice) -> "ColumnPairs":
        """Pairs for training: a column, a list or a dict of them for each of the two."""
        return ColumnPairs(self, inputs, target)


class ArrowRows(ColumnSource):
    """Rows out of tables of Arrow. A reader gives the tables."""

    def tables(self, ids: Ids) -> Iterator[tuple[Ids, Any]]:
        """Tables with the wanted rows, each with the places of its rows in `ids`."""
        raise NotImplementedError

    def values(self, table: Any, name: str, ids: Ids) -> list[Any]:
        """A column for records; `ids` are those of the rows."""
        return values_of(table.column(name))

    def array(self, table: Any, name: str, ids: Ids) -> NDArray[Any]:
        return array_of(table.column(name))

    def many(self, ids: Indices) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{}] * len(ids)
        ids = normalize_indices(ids, len(self))
        for places, table in self.tables(ids):
            values = [self.values(table, name, ids[places]) for name in self.columns]
            for place, row in zip(places, zip(*values, strict=True), strict=True):
                rows[place] = dict(zip(self.columns, row, strict=True))
        return rows

    def arrays(self, ids: Ids, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        ids = normalize_indices(ids, len(self))
        parts = list(self.tables(ids))
        back = np.argsort(np.concatenate([places for places, _ in parts]))
        found = {}
        for name in names:
            of_tables = [self.array(table, name, ids[places]) for places, table in parts]
            if len({part.shape[1:] for part in of_tables}) > 1:
                raise Irregular(f"lists of column {name!r} are of several lengths")
            found[name] = of_tables[0] if len(parts) == 1 else np.concatenate(of_tables)[back]
        return found


class ColumnPairs:
    """Pairs `(inputs, target)` from the columns of a table."""

    def __init__(self, source: ColumnSource, inputs: ColumnChoice, target: ColumnChoice):
        self.source, self.inputs, self.target = source, inputs, target
        self._names = sorted({*column_names(inputs), *column_names(target)})
        require_columns(self._names, source.columns, str(source))
        for name in self._names:
            kind = source.unfit(name)
            if kind is not None:
                raise UsageError(
                    f"column {name!r} of {source} holds {kind}, which is no number. Make tensors "
                    "of it by a function of your own: shoal.data.mapped(rows, function)."
                )
        self.order = order_of(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        pair = self.take(np.array([normalize_index(index, len(self))], dtype=np.int64))

        def row(tensor: Tensor) -> Tensor:
            return tensor[0]

        return map_tensors(row, pair[0]), map_tensors(row, pair[1])

    def identity(self) -> str:
        return hash_parts(identity_of(self.source), self.inputs, self.target)

    def content_name(self) -> str:
        tell = getattr(self.source, "content_name", None)
        return self.identity() if tell is None else hash_parts(tell(), self.inputs, self.target)

    def take(self, ids: Ids) -> tuple[Any, Any]:
        """The collated samples."""
        try:
            arrays = self.source.arrays(ids, self._names)
        except Irregular as error:
            self._name_the_sample(ids, error)
        tensors = {name: torch.from_numpy(_owned(array)) for name, array in arrays.items()}
        return select_columns(self.inputs, tensors), select_columns(self.target, tensors)

    def _name_the_sample(self, ids: Ids, error: Irregular) -> NoReturn:
        """Say which sample is the odd one; each by itself may be an array, of another shape."""
        shapes: dict[str, list[int]] = {}
        for index in ids:
            try:
                arrays = self.source.arrays(np.array([index], dtype=np.int64), self._names)
            except Irregular as own:
                raise BadRecord(f"{self.source} (sample {index}): {own}") from None
            for name, array in arrays.items():
                shape = shapes.setdefault(name, list(array.shape[1:]))
                if shape != list(array.shape[1:]):
                    raise BadRecord(
                        f"{self.source}: column {name!r} of sample {index} has the shape "
                        f"{list(array.shape[1:])}, and of sample {ids[0]} {shape}. Samples of a "
                        "batch must be alike; map the records by a function that pads them."
                    ) from None
        raise BadRecord(f"{self.source}: {error}") from None


def column_names(choice: ColumnChoice) -> list[str]:
    """The columns that a choice names."""
    if isinstance(choice, str):
        return [choice]
    return list(choice.values() if isinstance(choice, Mapping) else choice)


def select_columns(choice: ColumnChoice, values: Mapping[str, Any]) -> Any:
    """The values of a choice: one, a tuple or a dict."""
    if isinstance(choice, str):
        return values[choice]
    if isinstance(choice, Mapping):
        return {name: values[column] for name, column in choice.items()}
    return tuple(values[name] for name in choice)


def _owned(array: NDArray[Any]) -> NDArray[Any]:
    """An array that may be written to; what Arrow holds may not."""
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def is_numeric(kind: Any) -> bool:
    """Whether values of this type are numbers, or lists of numbers."""
    types = require("pyarrow.types", "parquet")
    kind = getattr(kind, "storage_type", kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return is_numeric(kind.value_type)
    if types.is_dictionary(kind):
        return is_numeric(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def array_of(column: Any) -> NDArray[Any]:
    """A column of numbers, or of lists of one length, as an array with a row for each value."""
    flat = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    return _array(flat)


def values_of(column: Any) -> list[Any]:
    """The values of a column for records: lists of numbers as arrays, the rest as Python has it."""
    kind = getattr(column.type, "storage_type", column.type)
    if not hasattr(kind, "value_type") or not is_numeric(kind):
        values: list[Any] = column.to_pylist()
        return values
    return [_row(column.slice(at, 1)) for at in range(len(column))]


def _row(column: Any) -> Any:
    try:
        return array_of(column)[0]
    except Irregular:
        return column.to_pylist()[0]


def _array(array: Any) -> NDArray[Any]:
    types = require("pyarrow.types", "parquet")
    array = getattr(array, "storage", array)
    kind = array.type
    if array.null_count:
        raise Irregular("a value is null, where a number should be")
    if types.is_dictionary(kind):
        return _array(array.dictionary_decode())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(array)
    if not is_numeric(kind):
        raise Irregular(f"values of the type {kind} are no numbers")
    found: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


def _lists(array: Any) -> NDArray[Any]:
    compute = require("pyarrow.compute", "parquet")
    lengths = np.unique(compute.list_value_length(array).to_numpy(zero_copy_only=False))
    if len(lengths) > 1:
        raise Irregular(f"lists have from {lengths[0]} to {lengths[-1]} values")
    inner = _array(array.flatten())
    length = int(lengths[0]) if len(lengths) else 0
    return inner.reshape(len(array), length, *inner.shape[1:])
