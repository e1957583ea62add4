"""A batch that is filled row by row: each sample is copied once, from the cache into its row.

What comes out equals the samples collated at once (`sources.collate_samples`), for samples whose
inputs and target are tensors, arrays or numbers, or a tuple or dict of them. Any others are not
taken, and their caller collates them. The first sample says what the rows look like. Those after it
are taken as they are packed, if their header is that of the first but for its numbers: then it is
known where their arrays go, and no sample is made of them that would have to be copied again. The
copied parts are returned for the check: the original may change meanwhile.

Cost: one copy of each sample, and some microseconds to read its header.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.data.packing import BadSample, BytesLike, pack_parts, read_header, tensor_bytes

Column: TypeAlias = Tensor | list[int] | list[float]
_ARRAYS = ("tensor", "array")  # what a list in a header begins with if it is no container


class RowMismatch(Exception):
    """A sample that does not go into such a batch."""


class BatchBuffer:
    """The rows of one batch; the first sample that is placed says what they look like."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._form: list[Any] = []
        self._columns: list[Column] = []
        self._header: Any = None  # of a packed sample, with types in the place of numbers
        self._sizes: list[int] = []  # of its arrays and the gaps between them
        self._buffers: list[memoryview] = []  # of the columns that arrays go into
        self._numbers: list[list[Any]] = []  # the other columns

    def place(self, row: int, sample: Any) -> None:
        """Copy a sample into its row; RowMismatch if it has not the form of the first."""
        leaves: list[Any] = []
        form = _form_of(sample, leaves)
        if not self._columns:
            self._form = form
            self._columns = [_column(leaf, self._num_rows) for leaf in leaves]
            self._learn(pack_parts(sample))
        elif form != self._form:
            raise RowMismatch
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[row] = leaf

    def copy(self, row: int, packed: memoryview) -> Sequence[BytesLike] | None:
        """What `fill` does, of a sample that is packed in one piece."""
        start = len(packed) - sum(self._sizes)
        if start < 0:
            return None
        parts: list[BytesLike] = [bytes(packed[:start])]
        for size in self._sizes:
            parts.append(packed[start : start + size])
            start += size
        return self.fill(row, parts)

    def fill(self, row: int, parts: Sequence[BytesLike]) -> Sequence[BytesLike] | None:
        """Copy a packed sample into its row, and return its parts as they were copied.

        None if it is not packed as the first was, or is no sample at all.
        """
        numbers = self._numbers_in(parts)
        if numbers is None:
            return None
        copied = [parts[0]]
        for buffer, size, part in zip(self._buffers, self._sizes[::2], parts[1::2], strict=True):
            own = buffer[row * size : (row + 1) * size]
            own[:] = part
            copied += [own] if len(copied) == 1 else [bytes(self._sizes[len(copied) - 1]), own]
        for column, number in zip(self._numbers, numbers, strict=True):
            column[row] = number
        return copied

    def _learn(self, parts: Sequence[BytesLike]) -> None:
        """How a sample that is packed in these parts goes into the columns."""
        self._header = _with_types(read_header(memoryview(parts[0]))[0])
        self._sizes = [len(part) for part in parts[1:]]
        self._buffers = [
            tensor_bytes(each).data for each in self._columns if isinstance(each, Tensor)
        ]
        self._numbers = [each for each in self._columns if isinstance(each, list)]

    def _numbers_in(self, parts: Sequence[BytesLike]) -> list[Any] | None:
        """The numbers in a header that is that of the first sample otherwise; None if it is not."""
        if self._header is None or [len(part) for part in parts[1:]] != self._sizes:
            return None
        header, numbers = memoryview(parts[0]), list[Any]()
        try:
            tree, start = read_header(header)
        except BadSample:
            return None
        is_like = start == len(header) and _is_like(tree, self._header, numbers)
        return numbers if is_like else None

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
        raise RowMismatch
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
            raise RowMismatch
    return parts


def _with_types(tree: Any) -> Any:
    """A header with the types of its numbers in their place."""
    if type(tree) in (int, float):
        return type(tree)
    if not isinstance(tree, list) or tree[0] in _ARRAYS:
        return tree
    # The names in a dict are no numbers, even if they are.
    is_name = [tree[0] == "dict" and at % 2 == 1 for at in range(len(tree))]
    return [part if bare else _with_types(part) for part, bare in zip(tree, is_name, strict=True)]


def _is_like(tree: Any, like: Any, numbers: list[Any]) -> bool:
    """Whether a header is like another but for its numbers, which go into a list."""
    if isinstance(like, type):
        numbers.append(tree)
        return type(tree) is like
    if not isinstance(like, list) or like[0] in _ARRAYS:
        return bool(tree == like and type(tree) is type(like))
    if type(tree) is not list or len(tree) != len(like):
        return False
    return all(_is_like(part, other, numbers) for part, other in zip(tree, like, strict=True))


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # a type that torch has not, which collating says in words
        raise RowMismatch from None


def _tensor_of_column(column: Column) -> Tensor:
    if isinstance(column, Tensor):
        return column
    return torch.tensor(column, dtype=torch.float64 if type(column[0]) is float else torch.int64)


def _column(leaf: Any, num_rows: int) -> Column:
    if isinstance(leaf, Tensor):
        return torch.empty((num_rows, *leaf.shape), dtype=leaf.dtype)
    return [leaf] * num_rows
