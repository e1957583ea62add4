"""What one process would have trained: the plain loop that every plan is compared with.

It walks the pieces of each batch in order in one process and shares with the plans only what defines
the run: its samples, its random state, its loss. How gradients are brought together is written here a
second time, on purpose. Under `local_steps` each replica is played in turn, with weights and an
optimizer of its own.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.data.loader import Batch
from shoal.data.split import share
from shoal.errors import NotFinite
from shoal.numerics import schedules
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.norms import clip_factor, gradient_norm
from shoal.numerics.precision import LossScale, Precision
from shoal.numerics.randomness import PieceSeeds
from shoal.plan import Plan
from shoal.run import Run, call_model, make_batches, objective

State = dict[str, Tensor]


class Snapshot(NamedTuple):
    """One replica after a step: the gradients its optimizer saw, its weights and buffers."""

    loss: float
    gradients: State
    weights: State
    buffers: State


def train(run: Run, plan: Plan) -> Iterator[list[Snapshot]]:
    """The replicas after each step; one, which stands for all, when they agree on every step."""
    num_replicas = plan.num_replicas if plan.local_steps > 1 else 1
    shares = [share(r, num_replicas, plan.num_pieces) for r in range(num_replicas)]
    replicas = [Replica(run, plan, pieces) for pieces in shares]
    batches = make_batches(run, plan.num_pieces)
    for step in range(run.num_steps()):
        batch = batches.at(step)
        told = [replica.step(batch) for replica in replicas]
        losses = [loss / weight for loss, weight in told]
        if (step + 1) % plan.local_steps == 0 or step + 1 == run.num_steps():
            average(replicas)
            losses = [sum(t[0] for t in told) / sum(t[1] for t in told)] * num_replicas
        yield [r.snapshot(loss) for r, loss in zip(replicas, losses, strict=True)]


class Replica:
    def __init__(self, run: Run, plan: Plan, pieces: range):
        self.run, self.pieces = run, pieces
        self.model = run.make_model().train()
        self.optimizer = run.make_optimizer(self.model)
        schedules.remember_rates(self.optimizer)
        self.seeds = PieceSeeds(self.model, run.seed)
        self.buffers = PieceBuffers(self.model)
        self.precision, self.loss_scale = Precision(plan.precision), LossScale(plan.precision)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def step(self, batch: Batch) -> tuple[float, float]:
        """Do a step; the sum of its loss and its weight."""
        while True:
            told: list[tuple[float, float, bool]] = []

            def leaf(piece: int, told: list[Any] = told) -> list[Tensor | None]:
                return self.piece(batch, piece, told)

            sums = tree_sum(leaf, self.pieces)
            loss, weight = sum(t[0] for t in told), sum(t[1] for t in told)
            unit = batch.num_samples if told[0][2] else 1.0
            self.buffers.restore()
            if math.isfinite(loss) and self.update(sums, unit / (weight * self.loss_scale.value), batch):
                self.loss_scale.good_step()
                return loss, weight
            if not self.loss_scale.overflow():
                raise NotFinite(f"the reference is not finite at step {batch.step + 1}")

    def piece(self, batch: Batch, index: int, told: list[Any]) -> list[Tensor | None]:
        """Gradients of one piece, then what it made of the buffers, each with a count of one."""
        piece = batch.piece(index)
        for p in self.parameters:
            p.grad = None
        self.buffers.restore()
        if not piece.num_samples:
            told.append((0.0, 0.0, told[0][2]))
            return [None] * (len(self.parameters) + 2 * len(self.buffers))
        self.seeds.enter(batch.step, index)
        with self.precision.autocast("cpu"):
            goal = objective(self.run, call_model(self.model, piece.inputs), piece)
        share_of_batch = piece.num_samples / batch.num_samples if goal.is_mean else 1.0
        goal.tensor.backward(goal.tensor.new_tensor(share_of_batch * self.loss_scale.value))
        loss, weight = goal.tensor.item(), float(goal.weight)
        told.append((loss * weight if goal.is_mean else loss, weight, goal.is_mean))
        values = self.buffers.end_piece()
        counts = [None if v is None else torch.ones((), dtype=torch.float64) for v in values]
        return [*(p.grad for p in self.parameters), *values, *counts]

    def update(self, sums: list[Tensor | None], scale: float, batch: Batch) -> bool:
        gradients = sums[: len(self.parameters)]
        present = [g for g in gradients if g is not None]
        if not all(torch.isfinite(g).all() for g in present):
            return False
        if self.run.clip is not None:
            norm = gradient_norm(present)
            plain = torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in present]))
            assert math.isclose(norm, plain.item(), rel_tol=1e-4), "the norm is wrong"
            scale *= clip_factor(norm * scale, self.run.clip)
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g if g is None else g.mul_(scale)
        schedule = self.run.make_schedule()
        if schedule is not None:
            schedules.apply(self.optimizer, schedule(batch.step, self.run.num_steps()))
        self.optimizer.step()
        values, counts = sums[len(gradients) :][: len(self.buffers)], sums[-len(self.buffers) :]
        if len(self.buffers):
            pairs = zip(values, counts, strict=True)
            self.buffers.commit([None if v is None or n is None else v / n for v, n in pairs])
        return True

    def snapshot(self, loss: float) -> Snapshot:
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        gradients = {n: p.grad for n, p in named if p.grad is not None}
        weights = {n: p.detach() for n, p in self.model.named_parameters()}
        return Snapshot(loss, gradients, weights, dict(self.model.named_buffers()))


def tree_sum(leaf: Callable[[int], list[Tensor | None]], pieces: range) -> list[Tensor | None]:
    """The sum over pieces in the order of one binary tree; a piece is asked for when it is due."""

    def node(first: int, size: int) -> list[Tensor | None] | None:
        if first >= len(pieces):
            return None
        if size == 1:
            return leaf(pieces[first])
        left, right = node(first, size // 2), node(first + size // 2, size // 2)
        if left is None or right is None:
            return left
        return [a if b is None else b if a is None else a + b for a, b in zip(left, right, strict=True)]

    root = node(0, 1 << max(0, (len(pieces) - 1).bit_length()))
    assert root is not None
    return root


@torch.no_grad()
def average(replicas: list[Replica]) -> None:
    """Every replica takes the mean of the weights and buffers of all."""
    if len(replicas) == 1:
        return
    tensors = [[*r.model.parameters(), *r.model.buffers()] for r in replicas]
    for alike in zip(*tensors, strict=True):
        if alike[0].is_floating_point():
            total = tree_sum(lambda i, alike=alike: [alike[i].clone()], range(len(alike)))[0]  # type: ignore[misc]
            assert total is not None
            for tensor in alike:
                tensor.copy_(total / len(replicas))
    for replica in replicas:
        replica.buffers.hold()
