"""The mean over ranks of vectors that are packed for the wire.

Every rank packs its vector and sends each rank a share of it, cut between blocks; the owner of a
share unpacks what has come, takes the mean in the tree's order, packs that, and hands it round. So
all ranks unpack the same bytes and hold the same bits, however many owners there are. What packing
drops is told, to be added the next time: by each rank of its own vector, by the owner of the mean.

Cost: 2 (n - 1) / n times the packed bytes per rank, as a ring all-reduce. Not for exact sums:
`reduce.py`. Read next: `numerics/quantization.py`, the codecs.
"""

from itertools import pairwise
from typing import Protocol

from torch import Tensor

from shoal.comm.collectives import Group, Pending
from shoal.comm.tree import Block, fold


class Codec(Protocol):
    """Packs flat vectors. Those of whole blocks may be packed one by one and joined."""

    name: str  # in a plan

    @property
    def block(self) -> int:
        """The elements that are packed together."""
        ...

    def num_bytes(self, num_elements: int) -> int: ...
    def encode(self, flat: Tensor) -> Tensor:
        """The bytes, uint8, of a flat vector."""
        ...

    def decode(self, packed: Tensor, num_elements: int) -> Tensor:
        """What such bytes stand for, in single precision."""
        ...


def cuts_of(num_elements: int, block: int, num_ranks: int) -> list[int]:
    """Where the shares of a vector begin, and its end; whole blocks each. Pure."""
    num_blocks = -(-num_elements // block)
    return [min(num_elements, num_blocks * r // num_ranks * block) for r in range(num_ranks + 1)]


class PackedMean:
    """A mean under way. All ranks make it, then call `fold`, then `finish`, in the same order.

    `owed` is what the last mean's packing dropped of this rank's share. `dropped` is what it drops
    of `flat`, and `owes`, after `fold`, what is owed next.
    """

    def __init__(self, group: Group, codec: Codec, flat: Tensor, owed: Tensor):
        self._group, self._codec, self._owed = group, codec, owed
        self._num_elements = flat.numel()
        marks = map(codec.num_bytes, cuts_of(flat.numel(), codec.block, group.num_ranks))
        lengths = [stop - start for start, stop in pairwise(marks)]
        own, num_ranks = lengths[group.rank], group.num_ranks
        self._packed = codec.encode(flat)
        self.dropped = flat - codec.decode(self._packed, flat.numel())
        self._arrived = self._packed.new_empty(num_ranks * own)
        self._result = self._packed.new_empty(sum(lengths))
        self._shares = self._result.split(lengths)
        self._pending = group.all_to_all(self._arrived, self._packed, [own] * num_ranks, lengths)

    def fold(self) -> None:
        """Take the mean of the own share and hand it round."""
        self._pending.wait()
        self._pending = Pending()
        own, length = self._shares[self._group.rank], self._owed.numel()
        parts: dict[Block, Tensor] = {}
        for rank in range(self._group.num_ranks):
            packed = self._arrived[rank * own.numel() : (rank + 1) * own.numel()]
            parts[Block(rank, 1)] = self._codec.decode(packed, length)
        mean = fold(parts, len(parts), Tensor.add_).div_(len(parts)) + self._owed
        own.copy_(self._codec.encode(mean))
        self.owes = mean - self._codec.decode(own, length)
        self._pending = self._group.gather_shards(self._shares)

    def finish(self) -> Tensor:
        self._pending.wait()
        return self._codec.decode(self._result, self._num_elements)

    def drain(self, deadline: float) -> None:
        self._pending.drain(deadline)
