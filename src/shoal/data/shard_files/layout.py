"""Samples as rows: which leaves they have, how a row is filled, and what rows are turned back into.

A sample fits a layout of rows if its leaves are tensors, arrays and numbers, and every other sample
has the same ones. `describe` says of one sample what it is made of; the builder compares. A batch
of rows gives what collating the samples one by one would give, numbers become tensors, too.

Cost: rows are filled up so that a file of them can be mapped anywhere, by at most 6 % for rows of
128 bytes and more. Next: `writing.py`, `reading.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.packing import DTYPES, dtype_name, tensor_bytes
from shoal.data.shard_files.format import BLOCK_BYTES, ITEM_BYTES, MOST_DEPTH, Leaf, RowLayout

Bytes = NDArray[np.uint8]
_WORD = 8
_NUMBERS: dict[type, tuple[str, str]] = {
    bool: ("bool", "bool"),
    int: ("int", "int64"),
    float: ("float", "float64"),
}


class DescribedSample(NamedTuple):
    """What a sample is made of; samples of one layout have the same `tree` and `leaves`."""

    tree: Any
    leaves: tuple[Leaf, ...]
    contents: tuple[Bytes, ...]  # of each leaf

    @property
    def num_bytes(self) -> int:
        return self.leaves[-1].start + self.leaves[-1].num_bytes if self.leaves else 0


class NotFixedSize(Exception):
    """A sample that does not fit into a row of fixed size."""


def describe(sample: Any) -> DescribedSample:
    """The tree and leaves of a sample; NotFixedSize if it holds text, say."""
    leaves: list[Leaf] = []
    contents: list[Bytes] = []

    def leaf(kind: str, dtype: str, shape: Sequence[int], content: Bytes) -> int:
        end = leaves[-1].start + leaves[-1].num_bytes if leaves else 0
        leaves.append(Leaf(kind, dtype, tuple(shape), _up(end, _WORD)))
        contents.append(content)
        return len(leaves) - 1

    tree = _tree(sample, leaf, 0)
    return DescribedSample(tree, tuple(leaves), tuple(contents))


def row_layout_of(described: DescribedSample, shard_bytes: int) -> RowLayout:
    """The layout for samples like this one, in shards of about so many bytes."""
    row_bytes = padded(described.num_bytes)
    block_rows = max(1, min(BLOCK_BYTES, shard_bytes) // row_bytes)
    shard_rows = max(1, shard_bytes // row_bytes // block_rows) * block_rows
    return RowLayout(row_bytes, block_rows, shard_rows, described.tree, described.leaves)


def padded(num_bytes: int) -> int:
    """The length of a row: a multiple of a power of two that costs little.

    A shard is mapped where a page and a row begin: the more twos in a row, the closer they lie.
    """
    twos = 1 << max(0, (num_bytes // 16).bit_length() - 1)
    return max(_WORD, _up(num_bytes, min(4096, max(_WORD, twos))))


def encode_row(rows: RowLayout, described: DescribedSample) -> bytearray:
    """A sample's row."""
    filled = bytearray(rows.row_bytes)
    for leaf, content in zip(rows.leaves, described.contents, strict=True):
        filled[leaf.start : leaf.start + leaf.num_bytes] = content.data
    return filled


def decode_row(rows: RowLayout, content: Tensor) -> Any:
    """The sample in a row, which it keeps using: bytes of its own, that is."""

    def leaf(number: int) -> Any:
        of = rows.leaves[number]
        part = content[of.start : of.start + of.num_bytes]
        if not of.num_bytes:
            part = torch.empty(0, dtype=torch.uint8)
        value = part.view(DTYPES[of.dtype]).view(of.shape)
        if of.kind == "tensor":
            return value
        return value.numpy() if of.kind == "array" else value.item()

    return _restore(rows.tree, leaf)


class Gather:
    """Batches of rows out of a tensor of them, [rows, row_bytes] of uint8; one gather a leaf."""

    def __init__(self, rows: RowLayout, content: Tensor):
        self._tree = rows.tree
        self._columns = [
            (_column(content, leaf), DTYPES[leaf.dtype], leaf.shape) for leaf in rows.leaves
        ]

    def batch(self, at: Tensor) -> Any:
        """The collated samples of the rows `at`."""
        num_rows = at.shape[0]  # len() of a tensor takes microseconds

        def leaf(number: int) -> Tensor:
            column, dtype, shape = self._columns[number]
            return column.index_select(0, at).view(dtype).view(num_rows, *shape)

        # default_collate makes lists of tuples; the loader spreads tuples over a model's arguments.
        return _restore(self._tree, leaf, lists=False)


def is_pair(rows: RowLayout) -> bool:
    """Whether a sample is (inputs, target), so that batches of them make sense."""
    parts = rows.tree.get("tuple", rows.tree.get("list")) if isinstance(rows.tree, dict) else None
    return parts is not None and len(parts) == 2


def _column(content: Tensor, leaf: Leaf) -> Tensor:
    """A leaf of all rows, in the widest elements it can be copied in."""
    size = next(size for size in (8, 4, 2, 1) if leaf.num_bytes % size == 0)
    words = content.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    return words[:, leaf.start // size : (leaf.start + leaf.num_bytes) // size]


def _tree(value: Any, leaf: Callable[..., int], depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise NotFixedSize
    if isinstance(value, Tensor):
        return leaf("tensor", *_of_tensor(value))
    if isinstance(value, np.ndarray | np.generic):
        return leaf("array", *_of_array(np.asarray(value)))
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise NotFixedSize
        return {"dict": [[key, _tree(part, leaf, depth + 1)] for key, part in value.items()]}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_tree(part, leaf, depth + 1) for part in value]}
    if type(value) not in _NUMBERS or (type(value) is int and not -(2**63) <= value < 2**63):
        raise NotFixedSize
    kind, dtype = _NUMBERS[type(value)]
    return leaf(kind, dtype, (), np.asarray(value, dtype=dtype).reshape(1).view(np.uint8))


def _of_tensor(tensor: Tensor) -> tuple[str, tuple[int, ...], Bytes]:
    name = dtype_name(tensor)
    if name is None:
        raise NotFixedSize
    return name, tuple(tensor.shape), tensor_bytes(tensor)


def _of_array(array: NDArray[Any]) -> tuple[str, tuple[int, ...], Bytes]:
    # Of another byte order, or of what torch has no type for: dates, text.
    if array.dtype.name not in ITEM_BYTES or array.dtype.byteorder not in "=|":
        raise NotFixedSize
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.dtype.name, array.shape, content


def _restore(tree: Any, leaf: Callable[[int], Any], lists: bool = True) -> Any:
    if isinstance(tree, int):
        return leaf(tree)
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return {key: _restore(part, leaf, lists) for key, part in parts}
    restored = [_restore(part, leaf, lists) for part in parts]
    return restored if lists and kind == "list" else tuple(restored)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
