"""Averages over replicas that are staged until every replica has them.

A replica may die at any time, so an agreement has two phases: all ranks receive the result into
separate memory and confirm it; only then does it take effect. A replica that sees it in effect
knows that every survivor has it, and applies it without another message.

Ranks that hold the same of a replica each bring a stripe of it together, and give each other the
results, so that all of it crosses between replicas once.

Cost: the tensors' bytes in memory while they are staged; 2 (n - 1) / n times that on the wire.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.compression import share_bounds
from shoal.comm.reduce import TreeReduce
from shoal.sync.costs import Message, tree_message
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import blocks_by_rank


class PeerStripes(NamedTuple):
    """A vector, cut among the ranks of a replica that hold the same. All of it, if it is short."""

    alike: Group
    bounds: list[int]

    @classmethod
    def of(cls, count: int, alike: Group, block: int = 1) -> "PeerStripes":
        """Of so many elements, in whole blocks."""
        return cls(alike, stripe_bounds(count, alike.num_ranks, block))

    @property
    def own(self) -> range:
        number = self.alike.rank if len(self.bounds) > 2 else 0
        return range(self.bounds[number], self.bounds[number + 1])

    def gather(self, stripe: Tensor) -> Tensor:
        """The whole vector, of which this is the own stripe. Every rank must call it."""
        if len(self.bounds) == 2:
            return stripe
        whole, own = stripe.new_empty(self.bounds[-1]), self.own
        whole[own.start : own.stop] = stripe
        self.alike.all_gather_shards(whole.split([b - a for a, b in pairwise(self.bounds)])).wait()
        return whole


def stripe_bounds(count: int, num_ranks: int, block: int = 1) -> list[int]:
    """Where stripes begin, and their end; a single one, if some rank would have none. Pure."""
    return [0, count] if count < num_ranks * block else share_bounds(count, block, num_ranks)


class StagedAverage:
    """Of floating-point tensors; the others stay each replica's own. `alike` are the ranks of this
    replica that hold the same. Every rank must make it."""

    @torch.no_grad()
    def __init__(self, group: Group, tensors: Sequence[Tensor], alike: Group):
        self._means: dict[Tensor, Tensor] = {}
        if group.num_ranks == 1:
            return
        tree = TreeReduce(group, blocks_by_rank(group.num_ranks, group.num_ranks))
        for same in _group_by_dtype(tensors):
            flat = torch.cat([t.reshape(-1) for t in same])
            stripes = PeerStripes.of(flat.numel(), alike)
            reduction = tree.start([flat[stripes.own.start : stripes.own.stop]])
            reduction.fold()
            mean = stripes.gather(reduction.finish().div_(group.num_ranks))
            parts = mean.split([t.numel() for t in same])
            self._means |= {t: part.view(t.shape) for t, part in zip(same, parts, strict=True)}

    @torch.no_grad()
    def apply(self) -> None:
        for tensor, mean in self._means.items():
            tensor.copy_(mean)

    def __getitem__(self, tensor: Tensor) -> Tensor:
        """The mean of one of them. A replica alone is its own."""
        return self._means.get(tensor, tensor)


def _group_by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Floating-point tensors, those of one type and device together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


# ---- costs


def own_stripe(layout: RankLayout, count: int, block: int = 1) -> range:
    """What of so many elements a rank of this layout brings to its peers."""
    n = 1 if layout.plan.zero == 3 or layout.num_apart == 1 else layout.num_replicas
    bounds = stripe_bounds(count, n, block)
    number = layout.place.data if len(bounds) > 2 else 0
    return range(bounds[number], bounds[number + 1])


def average_messages(
    layout: RankLayout, what: str, rows: Sequence[tuple[int, int]]
) -> list[Message]:
    """An average over replicas of (elements, bytes of one)."""
    n, _ = layout.line("replicas")
    own = [(len(own_stripe(layout, count)), size) for count, size in rows]
    sums = tree_message(what, own, blocks_by_rank(n, n), layout, "replicas")
    return [sums, gather_message(layout, rows, own)]


def gather_message(
    layout: RankLayout, rows: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]]
) -> Message:
    """The results of stripes, to the ranks of the replica that hold the same."""
    sizes = [mine * size for (count, size), (mine, _) in zip(rows, own) if mine < count]
    num_bytes = sum(sizes) * (layout.num_replicas - 1)
    return Message("what was agreed on", "data", "gather", len(sizes), num_bytes)
