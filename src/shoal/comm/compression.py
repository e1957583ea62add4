"""Compressed all-reduce: the mean over ranks of encoded vectors, with error feedback.

Every rank encodes its vector and sends each rank a share of it, cut between blocks; the owner of a
share decodes what has arrived, takes the mean in the tree's order, encodes it, and sends it to all.
So all ranks decode the same bytes and hold the same bits, however many owners there are. What the
encoding drops is returned as a residual, to be added the next time: by each rank for its own
vector, by the owner for the mean.

Cost: 2 (n - 1) / n times the packed bytes per rank, as a ring all-reduce. Not for exact sums:
`reduce.py`. Read next: `numerics/codecs.py`, the codecs.
"""

from itertools import pairwise
from typing import Protocol

from torch import Tensor

from shoal.comm.collectives import Group, Pending
from shoal.comm.tree import Block, fold


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


class CompressedMean:
    """A pending mean, by a codec whose blocks are separable: each rank decodes a share.

    All ranks create it, then call `fold`, then `finish`, in the same order.

    `last_residual` is that of the last mean, of this rank's share. `residual` is that of `flat`,
    and `mean_residual`, after `fold`, that of this mean.
    """

    def __init__(self, group: Group, codec: Codec, flat: Tensor, last_residual: Tensor):
        assert codec.is_separable, f"shares of what {codec.name} encodes cannot be decoded"
        self._group, self._codec, self._last_residual = group, codec, last_residual
        self._num_elements = flat.numel()
        marks = map(codec.num_bytes, share_bounds(flat.numel(), codec.block, group.num_ranks))
        lengths = [stop - start for start, stop in pairwise(marks)]
        own, num_ranks = lengths[group.rank], group.num_ranks
        self._encoded, self.residual = encode_with_residual(codec, flat)
        self._arrived = self._encoded.new_empty(num_ranks * own)
        self._result = self._encoded.new_empty(sum(lengths))
        self._shares = self._result.split(lengths)
        self._pending = group.all_to_all(self._arrived, self._encoded, [own] * num_ranks, lengths)

    def fold(self) -> None:
        """Take the mean of the own share and send it to all ranks."""
        self._pending.wait()
        self._pending = Pending()
        own, length = self._shares[self._group.rank], self._last_residual.numel()
        parts: dict[Block, Tensor] = {}
        for rank in range(self._group.num_ranks):
            encoded = self._arrived[rank * own.numel() : (rank + 1) * own.numel()]
            parts[Block(rank, 1)] = self._codec.decode(encoded, length)
        mean = fold(parts, len(parts), Tensor.add_).div_(len(parts)) + self._last_residual
        encoded, self.mean_residual = encode_with_residual(self._codec, mean)
        own.copy_(encoded)
        self._pending = self._group.all_gather_shards(self._shares)

    def finish(self) -> Tensor:
        self._pending.wait()
        return self._codec.decode(self._result, self._num_elements)

    def drain(self, deadline: float) -> None:
        self._pending.drain(deadline)
