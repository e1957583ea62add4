"""The norm of a gradient that is sharded over several ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.numerics.norms import block_norms, norm_of_blocks


class SharedNorm:
    """Every rank brings the norms of the blocks that it counts; all get the norm of all.

    `num_own` is how many those are at most. Every rank must call both methods.
    """

    def __init__(self, world: Group, num_own: int):
        lengths = [int(row[0]) for row in world.all_gather_numbers([num_own])]
        self._world, self._length = world, sum(lengths)
        self._start = sum(lengths[: world.rank])

    def of(self, gradients: Iterable[Tensor]) -> float:
        return self.of_blocks(block_norms(gradients))

    def of_blocks(self, own: Tensor) -> float:
        """The same, given their norms."""
        table = torch.zeros(self._length)
        table[self._start : self._start + len(own)] = own
        return norm_of_blocks(self._world.merge(table))
