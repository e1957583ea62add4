"""The reference: a plain training loop in one process, which every plan is compared with.

It computes the pieces of each batch in order. It shares with the plans what defines a run (samples,
random state, loss, how a piece treats buffers, the norm, the loss scale), which tests compare with
plain torch. How pieces and replicas are combined is written a second time, on purpose
(`reference_outer.py`). Under `local_steps` the replicas run one after the other.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.data.batches import Batch
from shoal.data.split import share
from shoal.errors import NotFinite
from shoal.numerics import schedules
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.norms import clip_factor, coalesced, gradient_norm, values_of
from shoal.numerics.optimizers import names_in, stepping_only
from shoal.numerics.precision import LossScale, PrecisionSchedule
from shoal.numerics.randomness import PieceSeeds
from shoal.plans.plan import Plan
from shoal.training.custom_step import PLAIN, Phase, StepBatch, parameters_by_name, total_of
from shoal.training.diagnostics import no_weight_error
from shoal.training.progress import PhaseResult
from shoal.training.run import Run, call_model, make_batches, objective, objective_of
from shoal.verify.reference_codec import make_exchange
from shoal.verify.reference_loop import ReferenceLoop
from shoal.verify.reference_outer import (
    ReferenceOuter,
    Values,
    average,
    pipeline_ranks,
    total_loss,
)


class ReplicaState(NamedTuple):
    """A replica after a step."""

    loss: float
    gradients: Mapping[str, Tensor]  # as the optimizer saw them, by `gradient_key`
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    num_phases: int = 1
    unsent: Mapping[str, Tensor] = {}  # of packed gradients, where steps are judged from it


class PieceLoss(NamedTuple):
    """`unit` is what the weight of all is divided by: samples if losses are means."""

    sum: float
    weight: float
    unit: float


def gradient_key(name: str, phase: int) -> str:
    """What the gradient of a parameter is called, in a phase of a step."""
    return f"{name} (phase {phase + 1})" if phase else name


def by_key(phases: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {gradient_key(n, k): g for k, phase in enumerate(phases) for n, g in phase.items()}


def train(run: Run, plan: Plan, make: Any = None) -> Iterator[list[ReplicaState]]:
    """The replicas after each step; a single one if they agree on every step. `make` replaces
    `Replica`."""
    num_replicas = plan.num_apart if plan.local_steps > 1 else 1
    shares = [share(r, num_replicas, plan.num_pieces) for r in range(num_replicas)]
    replicas = [(make or Replica)(run, plan, pieces) for pieces in shares]
    batches = make_batches(run, plan.num_pieces)
    moves_anchor = plan.local_steps > 1 and plan.has_anchor
    models = [r.model for r in replicas]
    outer = None
    if moves_anchor:
        outer = ReferenceOuter(models, plan, run.num_steps(), pipeline_ranks(run, plan))
    loop = ReferenceLoop(run, plan, replicas[0])
    for step in range(run.num_steps()):
        if loop.is_stopped:
            return
        batch = batches.at(step)
        results = [replica.step(batch) for replica in replicas]
        losses = [loss / weight for loss, weight in results]
        if outer is not None:
            outer.after(step + 1)
        if (step + 1) % plan.local_steps == 0 or step + 1 == run.num_steps():
            average([r.tensors(with_weights=outer is None) for r in replicas])
            for replica in replicas:
                replica.buffers.hold()
            losses = [sum(t[0] for t in results) / sum(t[1] for t in results)] * num_replicas
        loop.after(step + 1, losses[0])
        yield [r.snapshot(loss) for r, loss in zip(replicas, losses, strict=True)]


class Replica:
    """A model, its optimizer, and its pieces of each batch."""

    def __init__(self, run: Run, plan: Plan, pieces: range):
        self.run, self.plan, self.pieces = run, plan, pieces
        self.model = run.make_model().train()
        self.optimizer = run.make_optimizer(self.model)
        schedules.remember_rates(self.optimizer)
        self.seeds = PieceSeeds(self.model, run.seed, by_block=run.step is None)
        self.buffers = PieceBuffers(self.model)
        self.precisions = PrecisionSchedule.parse(plan.precision)
        self.precision, self.loss_scale = self.precisions.at(0), LossScale(plan.precision)
        self.norm: float | None = None
        self.parameters = [p for p in self.model.parameters() if p.requires_grad and p.numel()]
        self.shares = [share(r, plan.num_apart, len(pieces)) for r in range(plan.num_apart)]
        self.exchange = make_exchange(run, plan, pieces, self.model, self.optimizer)

    def step(self, batch: Batch) -> tuple[float, float]:
        """Do a step; returns the sum of its loss, and its weight."""
        self.gradients: list[dict[str, Tensor]] = []  # by phase, as the optimizer saw them
        self.precision = self.precisions.at(batch.step)
        if self.run.step is None:
            return self.phase(batch, PLAIN)
        results: list[PhaseResult] = []

        def minimize(phase: Phase) -> float:
            loss, weight = self.phase(batch, phase)
            results.append(PhaseResult(phase.name, loss / weight))
            return self.answer(phase, loss / weight)

        calls = StepBatch(batch.step, names_in(self.optimizer), (), minimize)
        self.run.step(calls)
        calls.end()
        return total_of(results), 1.0

    def answer(self, phase: Phase, loss: float) -> float:
        """What the step function hears of a phase, and may decide by."""
        return loss

    def phase(self, batch: Batch, phase: Phase) -> tuple[float, float]:
        """Do one phase; the same of it. A plain step is one."""
        self.gradients.append({})
        while True:
            self.changes = [0] * len(self.buffers)  # pieces that changed each buffer
            self.losses: list[PieceLoss] = []
            self.parts: dict[int, Any] = {}  # named, of the loss, by piece
            piece = functools.partial(self.piece, batch, phase)
            sums = self.exchange.combined(piece, self.loss_scale.value)
            if not self.losses:  # quarantine left out all samples
                self.buffers.restore()
                return math.nan, 1.0
            pairs = [(one.sum, one.weight) for one in self.losses]
            loss, weight = total_loss(pairs, self.shares, self.plan.combine)
            if not weight:
                is_share = len(self.pieces) < self.plan.num_pieces
                raise no_weight_error(batch.step, is_share=is_share)
            scale = self.losses[-1].unit / (weight * self.loss_scale.value)
            with stepping_only(self.optimizer, phase.of):
                is_made = math.isfinite(loss) and self.update(batch.step, sums, scale)
            if is_made:
                self.loss_scale.good_step()
                return loss, weight
            if not self.loss_scale.overflow():
                raise NotFinite(f"the reference is not finite at step {batch.step + 1}")

    def piece(self, batch: Batch, phase: Phase, index: int) -> Values:
        """Compute one piece: its gradients, then the buffers that it changed."""
        self.buffers.restore()
        self.model.zero_grad()
        piece = batch.piece(index)
        if piece.num_samples:
            self.seeds.enter(batch.step, index, phase.number)
            with self.precision.autocast("cpu"):
                if phase.loss is None:
                    goal = objective(self.run, call_model(self.model, piece.inputs), piece)
                else:
                    answer = phase.loss(self.model, piece.inputs, piece.target)
                    goal = objective_of(answer, piece)
            # A mean counts by its share of the batch; a sum is divided once, at the end.
            part = piece.num_samples / batch.num_samples if goal.is_mean else 1.0
            named = parameters_by_name(self.optimizer)
            trained = [p for n in phase.of for p in named[n] if p.requires_grad] or None
            start = goal.tensor.new_tensor(part * self.loss_scale.value)
            goal.tensor.backward(start, inputs=trained)
            weight, loss = float(goal.weight), goal.tensor.item()
            sum_, unit = (loss * weight, batch.num_samples) if goal.is_mean else (loss, 1.0)
            self.parts[index] = goal.parts
            self.losses.append(PieceLoss(sum_, weight, unit))
        values = self.buffers.end_piece()
        self.changes = [n + (v is not None) for n, v in zip(self.changes, values, strict=True)]
        return [*map(coalesced, (p.grad for p in self.parameters)), *values]

    def update(self, step: int, sums: Values, scale: float) -> bool:
        gradients, buffers = sums[: len(self.parameters)], sums[len(self.parameters) :]
        present = [g for g in gradients if g is not None]
        if not all(torch.isfinite(values_of(g)).all() for g in present):
            return False
        if self.run.clip is not None:
            self.norm = gradient_norm(present) * scale
            scale *= clip_factor(self.norm, self.run.clip)
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        for g in present:
            values_of(g).mul_(scale)
        if (schedule := self.run.make_schedule()) is not None:
            schedules.apply(self.optimizer, schedule(step, self.run.num_steps()))
        self.exchange.step(self.optimizer.step)
        self.note_gradients()
        pairs = zip(buffers, self.changes, strict=True)
        self.buffers.commit([None if sum_ is None else sum_ / n for sum_, n in pairs])
        return True

    def tensors(self, with_weights: bool) -> list[Tensor]:
        return [*(self.model.parameters() if with_weights else ()), *self.model.buffers()]

    def note_gradients(self) -> None:
        """As the optimizer saw them in the phase that is being made."""
        named = self.model.named_parameters()
        self.gradients[-1].update((n, p.grad.to_dense()) for n, p in named if p.grad is not None)

    def snapshot(self, loss: float) -> ReplicaState:
        named, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        return ReplicaState(
            loss,
            by_key(self.gradients),
            named,
            buffers,
            len(self.gradients),
            self.exchange.unsent(),
        )
