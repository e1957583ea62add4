"""Compressed reduce-scatter and all-reduce: sums over ranks of encoded vectors.

Every rank encodes its vector and sends each rank a share of it, cut between blocks; the owner of a
share decodes what has arrived and adds it up in the tree's order (`CompressedScatter`). For an
all-reduce it encodes the sum and sends it to all (`CompressedSum`), so all ranks decode the same
bytes and hold the same bits, however many owners there are. What the encoding drops is returned as
a residual, to be added the next time: by each rank for its own vector, by the owner for the sum.

Cost: (n - 1) / n times the packed bytes per rank, twice that for an all-reduce, as a ring has. Not
for exact sums: `reduce.py`. Read next: `numerics/codecs.py`, the codecs, and
`sync/gradient_packing.py`, which keeps the residuals of gradients.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from shoal.comm.collectives import Group, Pending
from shoal.comm.reduce import Reduction, TreeReduce
from shoal.comm.tree import Block, fold
from shoal.numerics.powersgd import orthonormal


class Codec(Protocol):
    """Encodes flat vectors."""

    name: str  # in a plan

    @property
    def is_separable(self) -> bool:
        """Whether vectors of whole blocks may be encoded one by one and joined. Not so of what
        looks at the whole vector: the largest elements of all, say, or a low rank."""
        ...

    @property
    def block(self) -> int:
        """The number of elements that are encoded together; of any number if not separable."""
        ...

    def num_bytes(self, num_elements: int) -> int: ...
    def encode(self, flat: Tensor) -> Tensor:
        """The bytes, uint8, of a flat vector."""
        ...

    def decode(self, encoded: Tensor, num_elements: int) -> Tensor:
        """The vector that these bytes encode, in single precision."""
        ...


def encode_with_residual(codec: Codec, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a vector, and what they drop of it: error feedback adds that the next time."""
    encoded = codec.encode(flat)
    return encoded, flat - codec.decode(encoded, flat.numel())


def share_bounds(num_elements: int, block: int, num_ranks: int) -> list[int]:
    """Where the shares of a vector begin, and its end; whole blocks each. Pure."""
    num_blocks = -(-num_elements // block)
    return [min(num_elements, num_blocks * r // num_ranks * block) for r in range(num_ranks + 1)]


Wanted = Sequence[Sequence[range]]  # the elements that each rank wants, in whole blocks


def shares_of(cuts: Sequence[int]) -> list[list[range]]:
    """What each rank wants of a vector whose shares begin at these cuts, the last its end."""
    return [[range(start, stop)] for start, stop in pairwise(cuts)]


def bytes_wanted(codec: Codec, wanted: Sequence[range]) -> list[range]:
    """Where these elements are in what a codec makes of the vector."""
    return [range(codec.num_bytes(r.start), codec.num_bytes(r.stop)) for r in wanted]


def joined(flat: Tensor, ranges: Sequence[range]) -> Tensor:
    """The elements of some ranges one after another; a view, if they follow one another."""
    if all(a.stop == b.start for a, b in pairwise(ranges)) and ranges:
        return flat[ranges[0].start : ranges[-1].stop]
    return torch.cat([flat[r.start : r.stop] for r in ranges] or [flat[:0]])


class CompressedScatter:
    """A pending sum of shares, by a codec whose blocks are separable: each rank decodes its own.

    All ranks create it, then call `fold`, in the same order. `flat` is consumed: if it `keeps` one,
    `residual` is what was dropped of it. What several ranks want goes to each of them.
    """

    def __init__(
        self, group: Group, codec: Codec, flat: Tensor, wanted: Wanted, keeps: bool = True
    ):
        assert codec.is_separable, f"shares of what {codec.name} encodes cannot be decoded"
        self._group, self._codec = group, codec
        self._length = sum(map(len, wanted[group.rank]))
        spans = [bytes_wanted(codec, own) for own in wanted]
        self.lengths = [sum(map(len, own)) for own in spans]
        self._own, num_ranks = self.lengths[group.rank], group.num_ranks
        self.encoded = codec.encode(flat)
        self._arrived = self.encoded.new_empty(num_ranks * self._own)
        sent = joined(self.encoded, [span for own in spans for span in own])
        self._pending = group.all_to_all(self._arrived, sent, [self._own] * num_ranks, self.lengths)
        # While it travels.
        self.residual = flat.sub_(codec.decode(self.encoded, flat.numel())) if keeps else None

    def fold(self) -> Tensor:
        """The sum of the own share."""
        self._pending.wait()
        self._pending = Pending()
        parts: dict[Block, Tensor] = {}
        for rank in range(self._group.num_ranks):
            encoded = self._arrived[rank * self._own : (rank + 1) * self._own]
            parts[Block(rank, 1)] = self._codec.decode(encoded, self._length)
        return fold(parts, len(parts), Tensor.add_)

    def drain(self, deadline: float) -> None:
        self._pending.drain(deadline)


class CompressedGather:
    """A pending gather of shards of which each rank has changed its own.

    Every rank encodes by how much its shard in `own` differs from that in `flat`, which all hold
    alike, and all add what they decode: also the owner, whose own values stay ahead of it by what
    was dropped. So nothing else must be kept for the next time. Every rank must call it.
    """

    def __init__(self, group: Group, codec: Codec, flat: Tensor, cuts: Sequence[int], own: Tensor):
        self._codec, self._parts = codec, [flat[a:b] for a, b in pairwise(cuts)]
        lengths = [codec.num_bytes(b) - codec.num_bytes(a) for a, b in pairwise(cuts)]
        changes = codec.encode(own - self._parts[group.rank])
        self._encoded = changes.new_empty(sum(lengths)).split(lengths)
        self._encoded[group.rank].copy_(changes)
        self._pending = group.all_gather_shards(self._encoded)

    def wait(self) -> None:
        self._pending.wait()
        for part, encoded in zip(self._parts, self._encoded, strict=True):
            part.add_(self._codec.decode(encoded, part.numel()))


class CompressedSum:
    """A pending sum for all ranks. All create it, then call `fold`, then `finish`, in this order.

    `last_residual` is that of the last sum, of this rank's share; None to keep none. `residual` is
    that of `flat`, which is consumed, and `sum_residual`, after `fold`, that of this sum. Elements
    in `padding` are zero, and no sum of rounding errors. With `divide_by` it is a mean.
    """

    sum_residual: Tensor | None = None

    def __init__(
        self,
        group: Group,
        codec: Codec,
        flat: Tensor,
        last_residual: Tensor | None,
        cuts: Sequence[int],
        padding: Sequence[range] = (),
        divide_by: int = 1,
    ):
        self._group, self._codec, self._last_residual = group, codec, last_residual
        self._num_elements, self._divide_by = flat.numel(), divide_by
        own = range(cuts[group.rank], cuts[group.rank + 1])
        self._padding = [_within(own, pad) for pad in padding]
        keeps = last_residual is not None
        self._scatter = CompressedScatter(group, codec, flat, shares_of(cuts), keeps)
        self.residual = self._scatter.residual
        if self.residual is not None:
            zero_ranges(self.residual, padding)
        self._result = self._scatter.encoded.new_empty(sum(self._scatter.lengths))
        self._shares = self._result.split(self._scatter.lengths)
        self._pending = Pending()

    def fold(self) -> None:
        """Sum the own share and send it to all ranks."""
        sum_ = self._scatter.fold()
        if self._divide_by > 1:
            sum_ = sum_.div_(self._divide_by)
        if self._last_residual is not None:
            sum_ = sum_ + self._last_residual
        zero_ranges(sum_, self._padding)
        encoded = self._codec.encode(sum_)
        self._shares[self._group.rank].copy_(encoded)
        self._pending = self._group.all_gather_shards(self._shares)
        if self._last_residual is not None:
            self.sum_residual = sum_.sub_(self._codec.decode(encoded, sum_.numel()))
            zero_ranges(self.sum_residual, self._padding)

    def finish(self) -> Tensor:
        self._pending.wait()
        return self._codec.decode(self._result, self._num_elements)

    def drain(self, deadline: float) -> None:
        self._scatter.drain(deadline)
        self._pending.drain(deadline)


class LowRankSum:
    """A pending sum of matrices as products of two thin ones (`numerics/powersgd.py`).

    `flat` holds the matrices from `starts` on, of these `shapes`; `factors` is where each begins.
    All ranks create it, then call `fold`, then `finish`, in the same order. Then `residual` is what
    this rank's matrices, of which `flat` is consumed, lack of its share of the sum, and `factors`
    are those to begin with the next time, the same on all ranks.
    """

    def __init__(
        self,
        tree: TreeReduce,
        flat: Tensor,
        starts: Sequence[int],
        shapes: Sequence[tuple[int, int]],
        factors: Sequence[Tensor],
    ):
        self._tree, self._flat, self.residual = tree, flat, flat
        self._matrices = [
            flat[start : start + rows * columns].view(rows, columns)
            for start, (rows, columns) in zip(starts, shapes, strict=False)
        ]
        self.factors = list(factors)
        self._pending = self._start([m @ q for m, q in zip(self._matrices, factors, strict=True)])

    def fold(self) -> None:
        """Agree on the columns, and send the rows."""
        self._pending.fold()
        self._columns = [orthonormal(part) for part in self._finish()]
        pairs = zip(self._matrices, self._columns, strict=True)
        self._pending = self._start([m.T @ p for m, p in pairs])

    def finish(self) -> Tensor:
        self._pending.fold()
        self.factors = self._finish()
        sum_, num_ranks = torch.zeros_like(self._flat), len(self._tree.blocks)
        for matrix, p, q in zip(self._matrices, self._columns, self.factors, strict=True):
            made = p @ q.T
            at = matrix.storage_offset() - self._flat.storage_offset()
            sum_[at : at + matrix.numel()] = made.view(-1)
        self._flat.sub_(sum_ / num_ranks)
        return sum_

    def drain(self, deadline: float) -> None:
        self._pending.drain(deadline)

    def _start(self, parts: Sequence[Tensor]) -> Reduction:
        self._shapes = [part.shape for part in parts]
        return self._tree.start([torch.cat([part.reshape(-1) for part in parts])])

    def _finish(self) -> list[Tensor]:
        parts = self._pending.finish().split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class LowRankScatter:
    """The same, of which each rank wants its share alone."""

    def __init__(self, sum_: LowRankSum, wanted: Sequence[range]):
        self._sum, self._wanted = sum_, wanted

    def fold(self) -> Tensor:
        self._sum.fold()
        return joined(self._sum.finish(), self._wanted)

    def drain(self, deadline: float) -> None:
        self._sum.drain(deadline)


def zero_ranges(flat: Tensor, ranges: Sequence[range]) -> None:
    for part in ranges:
        flat[part.start : part.stop].zero_()


def _within(own: range, part: range) -> range:
    """What of a range lies in another, counted from that one's start."""
    first, last = max(own.start, part.start), min(own.stop, part.stop)
    return range(first - own.start, max(first, last) - own.start)
