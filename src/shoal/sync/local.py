"""Local SGD: replicas step on their own and average their weights every H steps.

Each replica trains on its share of every global batch with its own optimizer; after H steps, and
after the last one, weights and buffers become the mean over replicas. Optimizer state stays local.
Use it where the link is slow: an H-th of the traffic, for results that differ from training on the
whole batch. Between two averages a replica's weights exist once, so its death ends the run. Losses
and requests are agreed on when weights are; in between, a replica reports its own.

Zinkevich et al. 2010; Stich 2019, arXiv 1805.09767. Cost: 2/H times the weights' bytes per step.
Read next: `outer.py`, where an outer optimizer takes the place of the average.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.reduce import TreeReduce
from shoal.data.ledger import add_marks
from shoal.data.split import share
from shoal.mesh import NOTHING_ASKED, Asked, Mesh
from shoal.numerics.fragments import Timetable
from shoal.parallel.layout import WHOLE, Holding, Slice
from shoal.sync.allreduce import AllReduce
from shoal.sync.outer import Outer, Rule
from shoal.sync.replicas import REPLICAS, Merged, of_replica
from shoal.sync.rounds import blocks_by_rank
from shoal.sync.state import Source, State
from shoal.sync.strategy import Agreed, Tally


class LocalSGD:
    """Without a `rule` weights are averaged, all at once."""

    in_lockstep, begins_at = True, 0

    def __init__(
        self, num_pieces: int, timetable: Timetable, exact: bool = True, rule: Rule | None = None
    ):
        self.num_pieces, self.timetable, self.exact = num_pieces, timetable, exact
        self.outer = None if rule is None else Outer(rule, timetable)
        self.step = 0
        self._alike = True  # whether weights are the same on all replicas
        self._marked, self._knows_marks = 0, True  # samples since weights were last averaged
        self._mark = 0  # of them and of those of the step under way
        self._mine: list[float] = []  # what this rank told the others of a window

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: Holding = WHOLE,
    ) -> None:
        self.group = mesh.data
        self.pieces = share(self.group.rank, self.group.num_ranks, self.num_pieces)
        self.inner = AllReduce(len(self.pieces), self.exact)
        alone = Group()
        self.inner.attach(model, optimizer, mesh._replace(world=alone, data=alone), holding)
        self.model, self.buffers = model, self.inner.buffers
        if self.outer is not None:
            self.outer.attach(model, self.group)

    def detach(self) -> None:
        self.inner.detach()
        if self.outer is not None:
            self.outer.detach()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first and self.outer is not None:
            self.outer.send_again()
        return self.inner.microbatch(first, last)

    def exchange(self, tally: Tally, want_norm: bool) -> Agreed:
        own = self.inner.exchange(tally, want_norm)._replace(num_samples=None)
        self._mark = add_marks((self._marked, tally.mark))
        if not self._averages(self.step + 1):
            busy_s = [tally.busy_s] * self.group.num_ranks
            # Heard with the others: all stop after the same step.
            return own._replace(busy_s=busy_s, mark=None, asked=NOTHING_ASKED)
        stops = float(tally.asked.stop)
        self._mine = [sum(own.sums), sum(own.weights), tally.busy_s, stops, self._mark]
        rows = self.group.gather_numbers(self._mine)
        return own._replace(
            sums=[row[0] for row in rows],
            weights=[row[1] for row in rows],
            busy_s=[row[2] for row in rows],
            asked=Asked(stop=any(row[3] for row in rows)),
            mark=add_marks(row[4] for row in rows) if self._knows_marks else None,
        )

    def update(self, scale: float, check: bool = True) -> bool:
        averages = self._averages(self.step + 1)
        if not self.inner.update(scale, check):
            return False
        self._commit(self.step + 1, averages)
        if self.outer is not None:
            self.outer.after(self.step)
        if averages:
            own = [] if self.outer is not None else list(self.model.parameters())
            self._average([*own, *self.model.buffers()])
        return True

    def _commit(self, step: int, averages: bool) -> None:
        self.step = step
        self._marked = 0 if averages else self._mark
        self._knows_marks |= averages
        self._alike = self.timetable.alike(step)

    def gradients(self) -> dict[str, list[Slice]]:
        return self.inner.gradients()

    def state_dict(self, served: bool = True) -> State:
        """What replicas do not share carries the replica's number."""
        state = self.inner.state_dict()
        own = of_replica("", self.group.rank)
        tensors = {
            name if self._alike and name.startswith("model.") else own + name: parts
            for name, parts in state.tensors.items()
        }
        if self.outer is not None:
            tensors |= self.outer.state_dict(own)
        return State(tensors, state.plain | {REPLICAS: self.group.num_ranks})

    def load_state_dict(self, source: Source, step: int, served: bool = True) -> None:
        self.step = step
        self._marked, self._knows_marks = 0, self._averages(step)
        same = source.plain.get(REPLICAS) == self.group.num_ranks
        own = Merged(source, self.group.rank if same else None)
        self.inner.load_state_dict(own, step)
        first = next((f"model.{name}" for name, _ in self.model.named_parameters()), "")
        self._alike = not same or first in source
        if self.outer is not None:
            self.outer.load_state_dict(own, Merged(source), step)

    def _averages(self, step: int) -> bool:
        """Whether replicas agree on losses and buffers, and without fragments on weights."""
        return self.timetable.ends_window(step)

    @torch.no_grad()
    def _average(self, averaged: Sequence[Tensor]) -> None:
        """Tensors become the mean over replicas. Every rank must reach this."""
        num_ranks = self.group.num_ranks
        if num_ranks == 1:
            return
        tree = TreeReduce(self.group, blocks_by_rank(num_ranks, num_ranks))
        for tensors in _by_kind(averaged):
            reduction = tree.start([torch.cat([t.reshape(-1) for t in tensors])])
            reduction.fold()
            mean = reduction.finish().div_(num_ranks)
            for tensor, part in zip(tensors, mean.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self.inner.buffers.hold()


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Floating-point tensors, those of one type and device together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())
