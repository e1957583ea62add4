"""Digests of tensors where they stand, and what replicas' digests say of one another.

A digest is XXH3 over a tensor's bytes, so equal bits have equal digests, whatever they stand for:
NaN, negative zeros, numbers of any type. State is taken as one long run of bytes that is cut
into slices, of which one is looked at in each step; little of it is one slice. What is not on the
CPU is summed where it is, as whole numbers, and the digest is of the sum.

Cost: 0.3 microseconds a tensor, and its bytes once through the cache: 10 GB/s and more on one core.
Read next: `consistency.py`.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

Name = tuple[str, ...]
NamedTensor = tuple[Tensor, Name]

SLICE_BYTES = 1 << 18  # that are looked at in a step at least, if there are as many
TENSOR_BYTES = 1 << 12  # that could be read in the time that it takes to turn to a tensor
_SUM_BYTES = 8
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class ByteSpan(NamedTuple):
    """Some bytes of a tensor, by its number."""

    number: int
    start: int
    stop: int


class TensorListing(NamedTuple):
    """Tensors that have bytes, each with a name."""

    tensors: list[Tensor]
    names: list[str]

    @classmethod
    def of(cls, named: Iterable[NamedTensor]) -> "TensorListing":
        found = [(tensor, name) for tensor, name in named if is_readable(tensor)]
        return cls([tensor for tensor, _ in found], [".".join(name) for _, name in found])


class CachedListing:
    """A listing of what an optimizer keeps, and perhaps more, made again only if that changed."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._listing: TensorListing | None = None

    def of(self, values: list[Any], named: Callable[[], Iterable[NamedTensor]]) -> TensorListing:
        """The same as before, if these are the same objects and none of them holds others."""
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if self._listing is None or not is_same:
            self._values, self._listing = values, TensorListing.of(named())
            if any(isinstance(value, dict | list | tuple) for value in values):
                self._values = [object()]  # like nothing that comes
        return self._listing


class DigestReader:
    """Looks at tensors, and keeps from one time to the next where they stand.

    A list of them that comes again must be the same, and not only equal; into how many slices it is
    cut, too.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._memory: list[memoryview | None] = []  # None if it is to be brought here each time
        self._sizes: list[int] = []  # bytes that count
        self._slices: dict[int, list[ByteSpan]] = {}  # of them
        self.num_slices = 1

    def parts(self, tensors: list[Tensor], turn: int, most_slices: int) -> list[ByteSpan]:
        """What the slice is made of whose turn it is, of at most so many."""
        self._look_at(tensors)
        if not self._slices:
            self.num_slices = num_slices(self._sizes, most_slices)
        number = turn % self.num_slices
        if number not in self._slices:
            self._slices[number] = list(slice_spans(self._sizes, number, self.num_slices))
        return self._slices[number]

    def digest(self, tensors: list[Tensor], turn: int, most_slices: int) -> int:
        """Of that slice."""
        state = xxh3_64()
        for number, start, stop in self.parts(tensors, turn, most_slices):
            state.update(self._bytes_of(number)[start:stop])
        return state.intdigest()

    def digests(self, tensors: list[Tensor], parts: Sequence[ByteSpan] | None = None) -> list[int]:
        """Of each part, or of each tensor."""
        self._look_at(tensors)
        if parts is None:
            return [xxh3_64_intdigest(self._bytes_of(number)) for number in range(len(tensors))]
        return [
            xxh3_64_intdigest(self._bytes_of(number)[start:stop]) for number, start, stop in parts
        ]

    def _look_at(self, tensors: list[Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if tensors is self._tensors and addresses == self._addresses:
            return
        self._tensors, self._addresses = tensors, addresses
        seen = [_map_memory(tensor) for tensor in tensors]
        self._memory, self._sizes = [memory for memory, _ in seen], [size for _, size in seen]
        self._slices = {}

    def _bytes_of(self, number: int) -> memoryview:
        return self._memory[number] or _bytes_of(self._tensors[number])


def is_readable(tensor: Tensor) -> bool:
    """Whether it has bytes of its own: not what is sparse, a stand-in, or of a class of its own."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return False
    return type(tensor.detach()) is Tensor


def num_slices(sizes: Sequence[int], most: int) -> int:
    """Into how many slices state is cut, by the bytes of its tensors. Pure."""
    cost = sum(sizes) + TENSOR_BYTES * len(sizes)
    return max(1, min(most, -(-cost // SLICE_BYTES)))


def slice_spans(sizes: Sequence[int], number: int, count: int) -> Iterator[ByteSpan]:
    """What slice `number` of `count` is made of, all of about the same bytes. Pure."""
    total = sum(sizes)
    first, last = total * number // count, total * (number + 1) // count
    at = 0
    for index, size in enumerate(sizes):
        start, stop = max(first - at, 0), min(last - at, size)
        if start < stop:
            yield ByteSpan(index, start, stop)
        at += size


def digest_to_float(digest: int) -> float:
    """A digest that a float holds exactly, and that is never 0."""
    return float(digest >> 12 | 1)


class Majority(NamedTuple):
    """What to think of replicas that do not hold the same."""

    odd: list[int]  # replicas that are not as most of them
    right: list[int]  # the others; none if there are no most


def find_majority(rows: Sequence[Sequence[float]]) -> Majority:
    """Which replicas are as most are, by the digests that each of them has. Pure."""
    held = [tuple(row) for row in rows]
    most, count = Counter(held).most_common(1)[0]
    if 2 * count <= len(held):
        return Majority(list(range(len(held))), [])
    right = [replica for replica, own in enumerate(held) if own == most]
    return Majority([replica for replica in range(len(held)) if replica not in right], right)


def canonical_nan(tensor: Tensor) -> Tensor:
    """With one NaN in the place of all: of two that are added, either may be the sum."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)


def _map_memory(tensor: Tensor) -> tuple[memoryview | None, int]:
    if tensor.device.type != "cpu":
        return None, _SUM_BYTES
    return _memory_of(tensor) if tensor.is_contiguous() else None, tensor.nbytes


def _memory_of(tensor: Tensor) -> memoryview:
    """Not by way of NumPy, which has no name for some types and forbids storage to be resized."""
    kind = ctypes.c_ubyte * tensor.nbytes
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def _bytes_of(tensor: Tensor) -> memoryview:
    brought = tensor.detach().contiguous()
    if brought.device.type == "cpu":
        return memoryview(bytes(_memory_of(brought)))
    numbers = torch.view_as_real(brought) if brought.is_complex() else brought
    sum_ = numbers.view(_WHOLE[numbers.itemsize]).sum(dtype=torch.int64)
    return memoryview(int(sum_).to_bytes(_SUM_BYTES, "little", signed=True))
