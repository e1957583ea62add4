"""Averages over replicas that are staged until every replica has them.

A replica may die at any time, so an agreement has two phases: all ranks receive the result into
separate memory and confirm it; only then does it take effect. A replica that sees it in effect
knows that every survivor has it, and applies it without another message.

Cost: the tensors' bytes in memory while they are staged; 2 (n - 1) / n times that on the wire.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.reduce import TreeReduce
from shoal.sync.rounds import blocks_by_rank


class StagedAverage:
    """Of floating-point tensors; the others stay each replica's own. Every rank must make it."""

    @torch.no_grad()
    def __init__(self, group: Group, tensors: Sequence[Tensor]):
        self._means: dict[Tensor, Tensor] = {}
        if group.num_ranks == 1:
            return
        tree = TreeReduce(group, blocks_by_rank(group.num_ranks, group.num_ranks))
        for alike in _group_by_dtype(tensors):
            reduction = tree.start([torch.cat([t.reshape(-1) for t in alike])])
            reduction.fold()
            mean = reduction.finish().div_(group.num_ranks)
            parts = mean.split([t.numel() for t in alike])
            self._means |= {t: part.view(t.shape) for t, part in zip(alike, parts, strict=True)}

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
