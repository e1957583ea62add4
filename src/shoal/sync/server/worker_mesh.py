"""What the ranks of a worker do together, where a replica is a mesh.

Those that hold the same add up their gradients, of which the first pushes the sum; the norm of a
gradient is over the parts of all, each of which servers tell to one rank. Parameters that several
parts hold whole (norms under `tensor`, what stages share) are those of the first one's servers: out
of lockstep servers of unlike parts may have stepped in another order, or be at another version.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from shoal.comm.buckets import GradientBucket, GradientBuckets
from shoal.comm.buffer_pool import BufferPool
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import Reduction
from shoal.numerics.norms import num_blocks
from shoal.parallel.layout import LocalLayout
from shoal.sync.norm import SharedNorm
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.parts import spread
from shoal.sync.server.worker_memory import PushedBucket

Named = Sequence[tuple[str, nn.Parameter]]


class SharedByParts:
    """What ranks of a replica hold that have unlike parts. Every rank of it must make it, and call
    `spread`."""

    def __init__(self, replica: Mesh, holding: LocalLayout, named: Iterable[tuple[str, Tensor]]):
        weights = dict(named)
        uncut = [p for n, p in weights.items() if n not in holding.cuts]
        self._groups = [(replica.tensor, uncut)] if replica.tensor.num_ranks > 1 else []
        for ranks in sorted({*holding.holders.values()}):
            group = replica.pipeline.subgroup(ranks)  # of all, also where others hold it
            tied = [p for n, p in weights.items() if holding.holders.get(n) == ranks]
            if replica.pipeline.rank in ranks and tied:
                self._groups.append((group, tied))

    def spread(self) -> None:
        """Give what the first rank holds to the others."""
        for group, weights in self._groups:
            spread(group, weights)


def first_of(group: Group, number: int) -> int:
    """What the first of these ranks says. Every one must call it."""
    return number if group.num_ranks == 1 else int(group.all_gather_numbers([number])[0][0])


def buckets_of_layout(
    layout: ServerLayout, parameters: Sequence[nn.Parameter]
) -> list[GradientBucket]:
    """As those of a rank that speaks with servers, in memory that none of them sees."""
    pool = BufferPool()
    return [
        GradientBucket(flat.indices, parameters, 1, pool, flat.starts)
        for flat in layout.flat_buffers
    ]


def finish_sums(buckets: GradientBuckets[PushedBucket | Reduction]) -> None:
    """Let rows be the sums over the ranks of a replica that hold the same. Each must call it."""
    buckets.fold_rest()
    for sum_, bucket in zip(buckets.sent, buckets.buckets, strict=True):
        assert isinstance(sum_, Reduction)
        if (found := sum_.finish()) is not bucket.rows[0]:
            bucket.rows[0].copy_(found)


class ServedNorm:
    """The norm of a replica's gradient. Every rank of it must make it, and call `of`."""

    def __init__(self, world: Group, named: Named, holding: LocalLayout, speaks: bool):
        self._named, self._holding = named, holding
        counted = sum(num_blocks(p.numel()) for n, p in named if holding.counts(n))
        self._shared = SharedNorm(world, counted if speaks else 0)

    def of(self, layout: ServerLayout, told: Sequence[Tensor]) -> float:
        """`told` is what each server told this rank of the blocks that it holds."""
        found = []
        for server, norms in enumerate(told):
            segments = [s for key in layout.held_by(server) for s in layout.segments(key)]
            parts = norms.split([num_blocks(s.length) for s in segments])
            for s, own in zip(segments, parts, strict=True):
                if self._holding.counts(self._named[s.parameter][0]):
                    found.append(own)
        return self._shared.of_blocks(torch.cat(found) if found else torch.zeros(0))
