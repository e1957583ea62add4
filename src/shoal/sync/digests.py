"""Digests of tensors where they stand, and what replicas' digests say of one another.

A digest is XXH3 over a tensor's bytes, so equal bits have equal digests, whatever they stand for:
NaN, negative zeros, numbers of any type. State is taken as one long stretch of bytes that is cut
into slices, of which one is looked at in each step; little of it is one slice. What is not on the
CPU is summed where it is, as whole numbers, and the digest is of the sum.

Cost: 0.3 microseconds a tensor, and its bytes once through the cache: 10 GB/s and more on one core.
Read next: `consistency.py`.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

SLICE_BYTES = 1 << 18  # that are looked at in a step at least, if there are as many
TENSOR_BYTES = 1 << 12  # that could be read in the time that it takes to turn to a tensor
_SUM_BYTES = 8
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Part(NamedTuple):
    """Some bytes of a tensor, by its number."""

    number: int
    start: int
    stop: int


class _Seen(NamedTuple):
    tensor: Tensor
    place: tuple[int, int] | None  # its address and bytes, if it has any
    memory: memoryview | None  # None if it is to be brought here each time
    num_bytes: int  # that count


class Reader:
    """Looks at tensors in a fixed order, and keeps from one time to the next where they stand."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self.num_slices = 1  # of what was looked at last

    def digest(self, tensors: Sequence[Tensor], turn: int, most_slices: int) -> int:
        """Of a slice: the one whose turn it is among at most so many."""
        seen, state = self._look_at(tensors), xxh3_64()
        for part in self._slice_of(seen, turn, most_slices):
            state.update(_bytes_of(seen[part.number])[part.start : part.stop])
        return state.intdigest()

    def digests_of_slice(
        self, tensors: Sequence[Tensor], turn: int, most_slices: int
    ) -> list[tuple[Part, int]]:
        """The same, tensor by tensor."""
        seen = self._look_at(tensors)
        return [
            (part, xxh3_64_intdigest(_bytes_of(seen[part.number])[part.start : part.stop]))
            for part in self._slice_of(seen, turn, most_slices)
        ]

    def digests(self, tensors: Sequence[Tensor]) -> list[int]:
        """Of each of them, as a whole."""
        return [xxh3_64_intdigest(_bytes_of(one)) for one in self._look_at(tensors)]

    def digest_of_part(self, tensor: Tensor, part: Part) -> int:
        """Of some bytes of a tensor that was looked at under the part's number."""
        seen = self._seen_as(part.number, tensor)
        return xxh3_64_intdigest(_bytes_of(seen)[part.start : part.stop])

    def _slice_of(self, seen: Sequence[_Seen], turn: int, most_slices: int) -> Iterator[Part]:
        sizes = [one.num_bytes for one in seen]
        self.num_slices = num_slices(sizes, most_slices)
        return parts_of(sizes, turn % self.num_slices, self.num_slices)

    def _look_at(self, tensors: Sequence[Tensor]) -> list[_Seen]:
        del self._seen[len(tensors) :]
        return [self._seen_as(number, tensor) for number, tensor in enumerate(tensors)]

    def _seen_as(self, number: int, tensor: Tensor) -> _Seen:
        if number == len(self._seen):
            self._seen.append(_see(tensor))
        seen = self._seen[number]
        if seen.tensor is not tensor or (seen.place and seen.place != _place_of(tensor)):
            seen = self._seen[number] = _see(tensor)
        return seen


def _is_readable(tensor: Tensor) -> bool:
    """Whether it has bytes of its own: not what is sparse, a stand-in, or of a class of its own."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return False
    return type(tensor.detach()) is Tensor


def num_slices(sizes: Sequence[int], most: int) -> int:
    """Into how many slices state is cut, by the bytes of its tensors. Pure."""
    cost = sum(sizes) + TENSOR_BYTES * len(sizes)
    return max(1, min(most, -(-cost // SLICE_BYTES)))


def parts_of(sizes: Sequence[int], number: int, count: int) -> Iterator[Part]:
    """What slice `number` of `count` is made of, all of about the same bytes. Pure."""
    total = sum(sizes)
    first, last = total * number // count, total * (number + 1) // count
    at = 0
    for index, size in enumerate(sizes):
        start, stop = max(first - at, 0), min(last - at, size)
        if start < stop:
            yield Part(index, start, stop)
        at += size


def as_number(digest: int) -> float:
    """A digest that a float holds exactly, and that is never 0."""
    return float(digest >> 12 | 1)


class Verdict(NamedTuple):
    """What to think of replicas that do not hold the same."""

    odd: list[int]  # replicas that are not as most of them
    right: list[int]  # the others; none if there are no most


def judge(rows: Sequence[Sequence[float]]) -> Verdict:
    """Which replicas are as most are, by the digests that each of them has. Pure."""
    held = [tuple(row) for row in rows]
    most, count = Counter(held).most_common(1)[0]
    if 2 * count <= len(held):
        return Verdict(list(range(len(held))), [])
    right = [replica for replica, own in enumerate(held) if own == most]
    return Verdict([replica for replica in range(len(held)) if replica not in right], right)


def one_nan(tensor: Tensor) -> Tensor:
    """With one NaN in the place of all: of two that are added, either may be the sum."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)


def _see(tensor: Tensor) -> _Seen:
    if not _is_readable(tensor):
        return _Seen(tensor, None, memoryview(b""), 0)
    if tensor.device.type != "cpu":
        return _Seen(tensor, _place_of(tensor), None, _SUM_BYTES)
    memory = _memory_of(tensor) if tensor.is_contiguous() else None
    return _Seen(tensor, _place_of(tensor), memory, tensor.nbytes)


def _place_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _memory_of(tensor: Tensor) -> memoryview:
    """Not by way of NumPy, which has no name for some types and forbids storage to be resized."""
    kind = ctypes.c_ubyte * tensor.nbytes
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def _bytes_of(seen: _Seen) -> memoryview:
    if seen.memory is not None:
        return seen.memory
    brought = seen.tensor.detach().contiguous()
    if brought.device.type == "cpu":
        return memoryview(bytes(_memory_of(brought)))
    numbers = torch.view_as_real(brought) if brought.is_complex() else brought
    sum_ = numbers.view(_WHOLE[numbers.itemsize]).sum(dtype=torch.int64)
    return memoryview(int(sum_).to_bytes(_SUM_BYTES, "little", signed=True))
