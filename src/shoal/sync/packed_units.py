"""Gradients of `zero=3` that are packed: a unit's reduce-scatter, with blocks of whole tensors.

FSDP2 gives each rank some rows of a tensor, and a codec's blocks begin with the tensor, so a block
may lie on both sides of a cut. It goes to both owners then, who add up all of it and keep what is
theirs. So shards are cut as they were, blocks are those of the whole tensor, and a sum has the bits
of one process that packs tensor by tensor. What a block has beyond a shard is kept until the step
is over, for the norm, whose blocks begin with the tensor too (`numerics/norms.py`).

Cost: a gradient's packed bytes once for each piece, and a block more for each tensor and cut. Not
for the way back: a parameter is gathered as it is, since no rank holds what a change of it could be
added to. Read next: `gradient_packing.py`, which keeps what was not sent.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.compression import CompressedScatter, LowRankScatter, Wanted
from shoal.numerics.codecs import TOP_BLOCK, WholeCodec, packs


class UnitGradient(NamedTuple):
    """A parameter in what FSDP2 sums of a unit, which is a row for each rank."""

    number: int  # of the parameter
    length: int  # of it
    width: int  # of a rank's part in a row; the last ranks may have less
    start: int  # in the vector of those that are packed, or of the others

    def own(self, rank: int) -> range:
        """The elements of a rank."""
        return range(min(rank * self.width, self.length), min((rank + 1) * self.width, self.length))

    def blocks(self, rank: int) -> range:
        """The elements of the whole blocks that these are in."""
        own = self.own(rank)
        if not own:
            return own
        return range(own.start // TOP_BLOCK * TOP_BLOCK, -(-own.stop // TOP_BLOCK) * TOP_BLOCK)

    def counted(self, rank: int) -> range:
        """The elements of the blocks that begin with a rank's."""
        own = self.own(rank)
        first = -(-own.start // TOP_BLOCK) * TOP_BLOCK
        return (
            range(first, min(self.blocks(rank).stop, self.length)) if first < own.stop else own[:0]
        )


class PackedUnit(NamedTuple):
    """The parameters of a unit of FSDP2: those that are packed, and the others."""

    in_order: list[UnitGradient]  # all of them, as they are in a row
    packed: list[UnitGradient]
    others: list[UnitGradient]

    @classmethod
    def of(
        cls, parameters: Sequence[tuple[int, Sequence[int], int]], codec: str, num_ranks: int
    ) -> "PackedUnit":
        """Parameters are given as (number, shape, bytes of an element). Pure."""
        found, starts = cls([], [], []), {True: 0, False: 0}
        for index, shape, size in parameters:
            length = torch.Size(shape).numel()
            width = -(-shape[0] // num_ranks) * torch.Size(shape[1:]).numel()
            is_packed = packs(codec, tuple(shape), size)
            one = UnitGradient(index, length, width, starts[is_packed])
            found.in_order.append(one)
            (found.packed if is_packed else found.others).append(one)
            starts[is_packed] += -(-length // TOP_BLOCK) * TOP_BLOCK
        return found

    def wanted(self, num_ranks: int) -> Wanted:
        """What each rank needs of the packed vector."""
        return [
            [_moved(t.blocks(rank), t.start) for t in self.packed if t.own(rank)]
            for rank in range(num_ranks)
        ]

    def wanted_of_others(self, num_ranks: int) -> Wanted:
        """The same of the other one, without padding."""
        return [
            [
                _moved(range(t.blocks(rank).start, min(t.blocks(rank).stop, t.length)), t.start)
                for t in self.others
                if t.own(rank)
            ]
            for rank in range(num_ranks)
        ]


class UnitScatter:
    """Sums a unit's gradients in the place of FSDP2's reduce-scatter, each shard at its owner.

    `pack` begins to sum the vector of what is packed; FSDP2 leaves out what is not trained now.
    Every rank must call it, as FSDP2 does.
    """

    def __init__(
        self,
        group: Group,
        unit: PackedUnit,
        pack: Callable[[Tensor], CompressedScatter | LowRankScatter],
        is_trained: Callable[[int], bool] = lambda index: True,
    ):
        self._group, self._unit, self._pack, self._is_trained = group, unit, pack, is_trained
        self._wanted = unit.wanted_of_others(group.num_ranks)
        self._by_index = {t.number: t for t in unit.in_order}
        self._beyond: dict[int, Tensor] = {}  # of this rank's last blocks, by parameter

    def begin(self) -> None:
        """A step begins, perhaps again."""
        self._beyond = {}

    @torch.no_grad()
    def __call__(self, output: Tensor, rows: Tensor) -> None:
        rows, unit = rows.view(self._group.num_ranks, -1), self._unit
        trained = [t for t in unit.in_order if self._is_trained(t.number)]
        *starts, end = accumulate((t.width for t in trained), initial=0)
        assert end == rows.shape[1], f"FSDP2 sums {rows.shape[1]} elements a rank, not {end}"
        places = {t.number: start for t, start in zip(trained, starts, strict=True)}
        output.zero_()
        begun: list[tuple[CompressedScatter | LowRankScatter, list[UnitGradient]]] = []
        if unit.packed:
            begun.append((self._pack(_gathered(rows, unit.packed, places)), unit.packed))
        if unit.others:
            flat, codec = _gathered(rows, unit.others, places), WholeCodec(rows.dtype)
            sum_ = CompressedScatter(self._group, codec, flat, self._wanted, keeps=False)
            begun.append((sum_, unit.others))
        for scatter, tensors in begun:
            self._put(scatter.fold(), tensors, output, places)

    def counted(self, index: int, gradient: Tensor) -> Tensor | None:
        """Of a parameter's gradient the blocks that this rank counts in the norm."""
        t, rank = self._by_index[index], self._group.rank
        counted, own = t.counted(rank), t.own(rank)
        if not counted:
            return None
        held = gradient.reshape(-1)[counted.start - own.start :]
        return torch.cat([held, self._beyond[index]]) if index in self._beyond else held

    def num_counted(self, index: int) -> int:
        """The elements of these."""
        return len(self._by_index[index].counted(self._group.rank))

    def _put(
        self,
        sums: Tensor,
        tensors: Sequence[UnitGradient],
        output: Tensor,
        places: Mapping[int, int],
    ) -> None:
        """Keep the sums of own elements, and of what the last blocks have beyond them."""
        rank, at, is_packed = self._group.rank, 0, tensors is self._unit.packed
        for t in tensors:
            own, blocks = t.own(rank), t.blocks(rank)
            stop = blocks.stop if is_packed else min(blocks.stop, t.length)
            found = sums[at : at + stop - blocks.start]
            at += len(found)
            if t.number not in places:
                continue
            place = places[t.number]
            output[place : place + len(own)] = found[own.start - blocks.start :][: len(own)]
            beyond = found[own.stop - blocks.start : min(stop, t.length) - blocks.start]
            if len(beyond):
                before = self._beyond.get(t.number)
                self._beyond[t.number] = beyond.clone() if before is None else before + beyond


def _gathered(rows: Tensor, tensors: Sequence[UnitGradient], places: Mapping[int, int]) -> Tensor:
    """The whole gradients of some parameters, each from a whole block on."""
    last = tensors[-1]
    flat = rows.new_zeros(last.start + -(-last.length // TOP_BLOCK) * TOP_BLOCK)
    for t in tensors:
        if (place := places.get(t.number)) is not None:
            part = rows[:, place : place + t.width].reshape(-1)[: t.length]
            flat[t.start : t.start + t.length] = part
    return flat


def _moved(elements: range, start: int) -> range:
    return range(start + elements.start, start + elements.stop)
