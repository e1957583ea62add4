"""Columns of Arrow as arrays and as plain values, with the types that they have.

Numbers, and lists of numbers nested to any depth, become numpy arrays; anything else becomes what
Python has for it. Nulls stay None in a record, and make a column of numbers irregular: a NaN in
their place would change the type of the others.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.readers.columns import Irregular
from shoal.optional import require


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
