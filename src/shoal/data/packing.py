"""Samples as bytes: what shards, caches and workers keep and pass on, without pickle.

A sample is a tree of tuples, lists and dicts; its leaves are tensors, numpy arrays, numbers, text,
bytes or nothing. `pack` writes the tree as a small header and the arrays behind it, each where a
cache line starts; `unpack` gives the tree back with arrays that look into the bytes and copy none
of them (they must not be written to). Any other type in a sample is refused by name.

    4 bytes   length of the header, little-endian
    header    msgpack: a leaf as it is, a container as a list that begins with its kind
    arrays    at the offsets that the header names, counted from a multiple of 64 after it

A writer does not need them in one piece of memory: `pack_parts` gives the parts one after the
other. Cost: one copy of the arrays to pack, none to unpack or for the parts.
Not for objects with code of their own.
"""

import math
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from shoal.data.shard_files.format import ITEM_BYTES
from shoal.errors import RecipeError
from shoal.storage.decoding import PARSE_ERRORS, reason

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_ALIGNMENT = 64
_MOST_DEPTH = 32
_PLAIN = (type(None), bool, int, float, str, bytes)
_OF_NUMPY = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_OF_NUMPY |= {torch.float16, torch.float32, torch.float64}
_NAMES = {kind: name for name, kind in DTYPES.items()}

BytesLike: TypeAlias = bytes | bytearray | memoryview


class BadSample(RecipeError):
    """Bytes that are no sample, or not the one that was kept."""


def pack(sample: Any) -> bytearray:
    """The sample's bytes; refuses by name what they cannot hold."""
    return bytearray().join(pack_parts(sample))


def pack_parts(sample: Any) -> list[BytesLike]:
    """What `pack` joins: the header, up to the first array; then arrays, a gap between every two.

    The arrays are the sample's own memory, as far as they lie in one piece.
    """
    arrays: list[tuple[int, memoryview]] = []
    try:
        header = msgspec.msgpack.encode(_Packer(arrays).tree(sample))
    except (OverflowError, UnicodeEncodeError) as error:
        raise RecipeError(
            f"a sample cannot be packed: {error}. Whole numbers have 64 bits at most, and text is "
            "what UTF-8 can hold; keep such a value as a tensor or in bytes."
        ) from error
    head = len(header).to_bytes(4, "little") + header
    parts: list[BytesLike] = [head.ljust(_aligned(len(head)), b"\0")]
    end = 0
    for offset, content in arrays:
        parts += [content] if len(parts) == 1 else [bytes(offset - end), content]
        end = offset + content.nbytes
    return parts


def unpack(packed: bytes | bytearray | memoryview) -> Any:
    """The sample in `packed`, whose arrays stay where they are."""
    view = memoryview(packed)
    tree, start = read_header(view)
    return _Unpacker(view[min(start, view.nbytes) :]).tree(tree)


def read_header(view: memoryview) -> tuple[Any, int]:
    """The header of a packed sample, and where its arrays begin."""
    if view.nbytes < 4:
        raise BadSample(f"{view.nbytes} bytes are no packed sample: the header's length is missing")
    length = int.from_bytes(view[:4], "little")
    if length > view.nbytes - 4:
        raise BadSample(f"its header would take {length} of {view.nbytes} bytes")
    try:
        tree = msgspec.msgpack.decode(view[4 : 4 + length])
    except PARSE_ERRORS as error:
        raise BadSample(f"its header cannot be read: {reason(error)}") from None
    return tree, _aligned(4 + length)


def dtype_name(tensor: Tensor) -> str | None:
    """The name of its type; None for a tensor that cannot be kept as bytes."""
    return _NAMES.get(tensor.dtype) if tensor.layout is torch.strided else None


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The elements of a dense tensor, row by row; what is only noted of them (conj) is done."""
    if tensor.dtype in _OF_NUMPY:  # in one call, where a tensor takes eight
        array = np.ascontiguousarray(tensor.numpy(force=True))
        return array.reshape(-1).view(np.uint8)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


class _Packer:
    def __init__(self, arrays: list[tuple[int, memoryview]]):
        self.arrays, self.end = arrays, 0

    def tree(self, value: Any, depth: int = 0) -> Any:
        if depth > _MOST_DEPTH:
            raise RecipeError(f"a sample is nested more than {_MOST_DEPTH} deep")
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self.array(np.asarray(value))
        if isinstance(value, Mapping):
            pairs = ((self.tree(k, depth + 1), self.tree(v, depth + 1)) for k, v in value.items())
            return ["dict", *(part for pair in pairs for part in pair)]
        if isinstance(value, PackedSequence):
            raise RecipeError(
                "a sample holds a PackedSequence, which would come out as a plain tuple. Pad "
                "sequences, hand their lengths on, and let the model pack them."
            )
        if isinstance(value, tuple | list):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, *(self.tree(part, depth + 1) for part in value)]
        if isinstance(value, _PLAIN):
            return value
        raise RecipeError(
            f"a sample holds a {type(value).__name__}, which cannot be kept as bytes. A sample is "
            "made of tensors, arrays, numbers, text and bytes, in tuples, lists and dicts."
        )

    def tensor(self, tensor: Tensor) -> list[Any]:
        kind = dtype_name(tensor)
        if kind is None:
            raise RecipeError(
                f"a sample holds a {tensor.layout} tensor of {tensor.dtype}, which cannot be kept "
                "as bytes. Make it a dense one of a common type."
            )
        return ["tensor", kind, list(tensor.shape), self.place(tensor_bytes(tensor))]

    def array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        if array.dtype.hasobject or array.dtype.names:
            raise RecipeError(
                f"a sample holds an array of {array.dtype}, which cannot be kept as bytes. Make it "
                "an array of numbers."
            )
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return ["array", array.dtype.str, list(array.shape), self.place(content)]

    def place(self, content: NDArray[np.uint8]) -> int:
        start = _aligned(self.end)
        self.arrays.append((start, content.data))
        self.end = start + content.nbytes
        return start


class _Unpacker:
    def __init__(self, arrays: memoryview):
        self.arrays = arrays

    def tree(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if depth > _MOST_DEPTH:
            raise BadSample(f"its header is nested more than {_MOST_DEPTH} deep")
        match value:
            case ["tuple", *parts]:
                return tuple(self.tree(part, depth + 1) for part in parts)
            case ["list", *parts]:
                return [self.tree(part, depth + 1) for part in parts]
            case ["dict", *parts] if len(parts) % 2 == 0:
                return self.mapping(parts, depth + 1)
            case ["tensor", str(kind), [*shape], int(offset)] if kind in DTYPES:
                return self.tensor(DTYPES[kind], shape, offset)
            case ["array", str(kind), [*shape], int(offset)]:
                return self.array(kind, shape, offset)
        raise BadSample("its header names something that no sample holds")

    def mapping(self, parts: list[Any], depth: int) -> dict[Any, Any]:
        pairs = zip(parts[::2], parts[1::2])
        try:
            return {self.tree(k, depth): self.tree(v, depth) for k, v in pairs}
        except TypeError:
            raise BadSample("a key of its dict is no key") from None

    def tensor(self, kind: torch.dtype, shape: list[Any], offset: int) -> Tensor:
        content = self.content(shape, kind.itemsize, offset)
        if not content.nbytes:
            return torch.empty(shape, dtype=kind)
        if content.readonly:
            _quieten()
        return torch.frombuffer(content, dtype=kind).view(shape)

    def array(self, kind: str, shape: list[Any], offset: int) -> np.ndarray[Any, Any]:
        try:
            of = np.dtype(kind)
        except TypeError:
            raise BadSample(f"its array is of {kind!r}, which is no type") from None
        if of.hasobject or of.names or not of.itemsize:
            raise BadSample(f"its array is of {kind!r}, which holds no numbers")
        return np.frombuffer(self.content(shape, of.itemsize, offset), dtype=of).reshape(shape)

    def content(self, shape: list[Any], itemsize: int, offset: int) -> memoryview:
        if not all(isinstance(size, int) and 0 <= size < 2**48 for size in shape):
            raise BadSample(f"its array has the shape {shape}")
        stop = offset + math.prod(shape) * itemsize
        if not 0 <= offset <= stop <= self.arrays.nbytes:
            raise BadSample(f"its array would end at {stop} of {self.arrays.nbytes} bytes")
        return self.arrays[offset:stop]


@cache
def _quieten() -> None:
    """Make torch issue, once and unheard, its warning that such a tensor is read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
