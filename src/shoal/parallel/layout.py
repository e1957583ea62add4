"""Which part of a parameter a rank holds, and where it lies in the whole. Pure.

A parameter cut over the tensor axis keeps its name and becomes smaller along one dim. Packed
matrices (query, key and value in one) are cut within each of their equal packs, so that a rank
holds its heads of all three; its part is then several blocks of the whole.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.parallel.boxes import Box, whole_box


class Cut(NamedTuple):
    """A parameter or buffer is shared out along `dim`, within each of `packs` equal parts."""

    dim: int
    packs: int = 1


def blocks_of_rank(shape: Sequence[int], cut: Cut, rank: int, num_ranks: int) -> list[Box]:
    """The boxes of the whole that one rank holds, in the order in which it holds them."""
    length = shape[cut.dim] // (cut.packs * num_ranks)
    assert length * cut.packs * num_ranks == shape[cut.dim], (shape, cut, num_ranks)
    blocks = []
    for pack in range(cut.packs):
        offset, size = [0] * len(shape), list(shape)
        offset[cut.dim] = (pack * num_ranks + rank) * length
        size[cut.dim] = length
        blocks.append(Box(tuple(offset), tuple(size)))
    return blocks


def part_of(tensor: Tensor, cut: Cut, rank: int, num_ranks: int) -> Tensor:
    """A copy of what one rank holds."""
    packs = tensor.detach().chunk(cut.packs, cut.dim)
    size = packs[0].shape[cut.dim] // num_ranks
    parts = [pack.narrow(cut.dim, rank * size, size) for pack in packs]
    return torch.cat(parts, cut.dim)


def flat_blocks(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that a run of elements, counted in row-major order, is made of."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = 1
    for size in shape[1:]:
        row *= size
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        return _inside(shape, start // row, start % row, stop - start // row * row)
    blocks = _inside(shape, start // row, start % row, row) if start % row else []
    if first < last:
        blocks.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return blocks + (_inside(shape, last, 0, stop % row) if stop % row else [])


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [
        Box((row, *block.offset), (1, *block.shape))
        for block in flat_blocks(shape[1:], start, stop)
    ]


class LocalLayout(NamedTuple):
    """What this rank holds of the model, where a replica takes several ranks."""

    cuts: Mapping[str, Cut] = MappingProxyType({})  # over the tensor axis, by name
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # of the whole, cut or not
    within: Mapping[str, Box] = MappingProxyType({})  # the part of that, if ZeRO 3 cut it again
    rank: int = 0  # on the tensor axis
    num_ranks: int = 1
    pipeline: int = 0  # rank on that axis
    elsewhere: frozenset[str] = frozenset()  # held here, counted by an earlier pipeline rank
    absent: frozenset[str] = frozenset()  # stand here for another pipeline rank's
    holders: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # of tied ones: pipeline ranks

    def counts(self, name: str) -> bool:
        """Whether this rank is the one to count a parameter in sums over the whole model."""
        return name not in self.elsewhere and (name in self.cuts or self.rank == 0)

    def is_first(self, name: str) -> bool:
        """Whether this rank is the first that holds a parameter, of which others may hold all."""
        first = self.holders.get(name, (self.pipeline,))[0]
        return first == self.pipeline and (name in self.cuts or self.rank == 0)

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        return self.shapes.get(name, tuple(tensor.shape))

    def blocks(
        self, name: str, values: Tensor, within: Box | None = None
    ) -> list[tuple[Box, Tensor]]:
        """The boxes of the whole that held values are made of, each with its values.

        `within` is where the values stand in what this rank holds; they are all of it if left out.
        """
        own = within or self.within.get(name) or whole_box(values.shape)
        if name not in self.cuts:
            return [(own, values)]
        cut, found, at = self.cuts[name], [], 0
        for box in blocks_of_rank(self.shapes[name], cut, self.rank, self.num_ranks):
            length = box.shape[cut.dim]
            first = max(own.offset[cut.dim], at)
            last = min(own.offset[cut.dim] + own.shape[cut.dim], at + length)
            if first < last:
                offset, shape = list(own.offset), list(own.shape)
                offset[cut.dim] = box.offset[cut.dim] + first - at
                shape[cut.dim] = last - first
                part = values.narrow(cut.dim, first - own.offset[cut.dim], last - first)
                found.append((Box(tuple(offset), tuple(shape)), part))
            at += length
        return found


WHOLE = LocalLayout()  # all of it


class Slice(NamedTuple):
    """A block of a logical tensor, and where it lies in it."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def whole_slice(tensor: Tensor) -> Slice:
    """All of a logical tensor."""
    tensor = tensor.detach()
    return Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def copy_slices(parts: Iterable[Slice], place: Slice) -> int:
    """Fill a place from parts that are cut in any way; how many elements did not come."""
    wanted, missing = Box(place.offset, tuple(place.tensor.shape)), place.tensor.numel()
    for part in parts:
        there = Box(part.offset, tuple(part.tensor.shape))
        is_of_it = part.global_shape == place.global_shape and there.fits(part.global_shape)
        if is_of_it and (common := wanted.intersect(there)) is not None:
            source = common.relative_to(there).of(part.tensor)
            common.relative_to(wanted).of(place.tensor).copy_(source)
            missing -= common.numel
    return missing


def slices(tensors: Mapping[str, Tensor], holding: LocalLayout) -> dict[str, list[Slice]]:
    """Held tensors as blocks of the logical ones."""
    return {name: slices_of(name, tensor, holding) for name, tensor in tensors.items()}


def slices_of(name: str, tensor: Tensor, holding: LocalLayout) -> list[Slice]:
    """What this rank holds of a tensor, as blocks of the logical one; views of it."""
    if name in holding.absent or (name in holding.within and not tensor.numel()):
        return []
    whole_shape = holding.whole_shape(name, tensor)
    return [
        Slice(part, whole_shape, block.offset)
        for block, part in holding.blocks(name, tensor.detach())
    ]


def slices_within(name: str, places: Iterable[Slice], holding: LocalLayout) -> list[Slice]:
    """Blocks of what this rank holds of a tensor, as blocks of the logical one; views of them."""
    return [
        Slice(part, holding.shapes.get(name, place.global_shape), block.offset)
        for place in places
        for block, part in holding.blocks(
            name, place.tensor, Box(place.offset, tuple(place.tensor.shape))
        )
    ]


def slices_of_run(
    name: str, shape: Sequence[int], start: int, values: Tensor, holding: LocalLayout
) -> list[Slice]:
    """Neighbouring elements of a held tensor, from `start`, as blocks of the logical one."""
    whole_shape = holding.shapes.get(name, tuple(shape))
    found, at = [], 0
    for box in flat_blocks(shape, start, start + values.numel()):
        size = math.prod(box.shape)
        part = values.detach()[at : at + size].view(box.shape)
        at += size
        found += [
            Slice(piece, whole_shape, block.offset)
            for block, piece in holding.blocks(name, part, box)
        ]
    return found
