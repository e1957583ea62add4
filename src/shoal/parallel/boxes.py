"""Boxes of tensors: intersection, tiling and splitting. Pure.

A logical tensor is known by its shape; what a rank holds or a file stores of it is a box. Whether
boxes cover the whole exactly once, and what two of them have in common, needs no torch to answer.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Box(NamedTuple):
    """A box of a whole tensor: where it starts in each dim, and how far it reaches."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fits(self, whole: Sequence[int]) -> bool:
        """Whether it lies inside a tensor of this shape."""
        return len(self.offset) == len(self.shape) == len(whole) and all(
            start >= 0 and length > 0 and start + length <= size
            for start, length, size in zip(self.offset, self.shape, whole)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """What two boxes have in common; None if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(self.offset, self.shape, other.offset, other.shape, starts)
        )
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def relative_to(self, other: "Box") -> "Box":
        """This box as seen from the corner of another one that contains it."""
        if not any(other.offset):
            return self
        return Box(tuple(a - b for a, b in zip(self.offset, other.offset)), self.shape)

    def of(self, tensor: "Tensor") -> "Tensor":
        """The view of this box."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def cut(self, dim: int, start: int, stop: int) -> "Box":
        """The part from `start` to `stop` along one dim."""
        offset, shape = list(self.offset), list(self.shape)
        offset[dim] += start
        shape[dim] = stop - start
        return Box(tuple(offset), tuple(shape))


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def tile(boxes: Sequence[Box], whole: Sequence[int]) -> bool:
    """Whether boxes that fit cover a whole exactly once.

    How often a point is covered changes at the corners of boxes alone, up at some and down at
    others. So boxes tile a whole if and only if their signed corners add up to the whole's own.
    """
    if 0 in whole:
        return not boxes
    cut = [dim for dim, size in enumerate(whole) if any(box.shape[dim] != size for box in boxes)]
    if len(cut) > MOST_CUT_DIMS:
        return False
    if len(cut) <= 1:  # the common case, by the spans alone
        spans = sorted((box.offset[d], box.offset[d] + box.shape[d]) for box in boxes for d in cut)
        ends = [0, *(stop for _, stop in spans)]
        in_turn = all(start == end for (start, _), end in zip(spans, ends))
        return in_turn and ends[-1] == whole[cut[0]] if cut else len(boxes) == 1
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in [*((box, 1) for box in boxes), (whole_box(whole), -1)]:
        edges = [((box.offset[d], 1), (box.offset[d] + box.shape[d], -1)) for d in cut]
        for corner in itertools.product(*edges):
            corners[tuple(at for at, _ in corner)] += sign * math.prod(one for _, one in corner)
    return not any(corners.values())


def split_box(box: Box, most: int) -> Iterator[Box]:
    """Parts of at most `most` elements, as rows of the first dims, in the box's own order."""
    if box.numel <= most:
        yield box
        return
    dim = next(d for d, length in enumerate(box.shape) if length > 1)
    row = box.numel // box.shape[dim]
    step = max(1, most // row)
    for start in range(0, box.shape[dim], step):
        part = box.cut(dim, start, min(start + step, box.shape[dim]))
        yield from split_box(part, most)


MOST_CUT_DIMS = 12  # a box has two to the power of that many corners
