"""Forward and backward of a rank's pieces, however the model is cut.

A round is one piece through the whole model, or through the layers' parts that the tensor axis
leaves here; with a pipeline it is several pieces through this rank's stages. What a piece computes
is a pure function of (weights, step, piece): random state and buffers are set on the way in, and
each piece's gradient is kept apart until the tree adds them up.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.comm.tree import PieceSum, Values, total
from shoal.data.batches import Batch, Piece
from shoal.data.split import shares
from shoal.errors import GroupLost, ShoalError, found_in
from shoal.events.tracing import TRACER
from shoal.numerics.precision import LossScale, PrecisionSchedule
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.apply import ParallelModel
from shoal.parallel.pipeline.scheduled_stage import PipelineHooks
from shoal.plans.plan import Plan
from shoal.sync.allreduce import is_summed
from shoal.sync.choose import wait_for_parameters
from shoal.sync.strategy import LocalStep, Strategy
from shoal.training.custom_step import PLAIN, Phase, refuse_independent
from shoal.training.diagnostics import (
    copy_small_buffers,
    refuse_late_writes,
    watch_first_piece,
)
from shoal.training.run import Objective, Run, objective, objective_of

_AS_IT_IS: AbstractContextManager[AbstractContextManager[None]] = nullcontext(nullcontext())


class _AsRaised(ContextDecorator):
    """Around a recipe's code: a group that is lost inside it, in a lookup say, is so outside too,
    whatever that code made of the error. A class, since a generator costs a step a microsecond."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, *where: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ShoalError):
            return
        if (lost := found_in(error, GroupLost)) is not None:
            raise type(lost)(str(lost)) from error


AS_RAISED = _AsRaised()


class PieceRunner:
    """Call `settle` for every new mesh, then `round` for each of a step's rounds, in order."""

    def __init__(
        self, run: Run, plan: Plan, spread: ParallelModel, seeds: PieceSeeds, loss_scale: LossScale
    ):
        self.run, self.plan, self.spread = run, plan, spread
        self.seeds, self.loss_scale = seeds, loss_scale
        self.watched: set[str] = set()  # phases of which this rank's first piece was watched
        self._known: set[tuple[str, ...]] = set()  # what phases train, and that their losses do
        self._parameters: Mapping[str, Sequence[nn.Parameter]] = {}
        self._precisions, self._step = PrecisionSchedule.parse(plan.precision), 0
        self._starts: dict[tuple[float, torch.dtype], Tensor] = {}  # what backward begins with

    def settle(self, mesh: Mesh, strategy: Strategy) -> None:
        self._strategy = strategy
        self._device_kind = mesh.device.split(":")[0]
        size = self.plan.num_microbatches
        num_rounds = self.plan.num_pieces // size
        own = shares(num_rounds, mesh.data.num_ranks, mesh.counts)[mesh.data.rank]
        self.rounds = [range(number * size, (number + 1) * size) for number in own]
        self._pieces = _PiecesInPipeline(self, mesh, strategy)
        self.spread.settle(mesh, self._pieces, self.arithmetic)

    def train_apart(self, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """Know the parameters of each named optimizer, which a phase may be of."""
        self._parameters = parameters

    @property
    def model(self) -> nn.Module:
        return self.spread.model

    def follow(self, step: int) -> None:
        """Compute from now on as after so many steps."""
        self._step = step

    def arithmetic(self) -> AbstractContextManager[Any]:
        """The context of a forward, in the precision of the step."""
        return self._precisions.at(self._step).autocast(self._device_kind)

    @AS_RAISED
    def round(
        self, batch: Batch, phase: Phase, indices: range, pieces: Sequence[Piece], tally: LocalStep
    ) -> None:
        """Compute the pieces `indices` of a batch; their losses go to `tally`."""
        self.follow(batch.step)
        if self.spread.pipeline is not None:
            self._pieces.round(batch, indices, pieces, tally)
            return
        (index,), (piece,) = indices, pieces
        if not piece.num_samples:  # of a short last batch
            tally.losses.append(torch.zeros(()))
            tally.weights.append(0.0)
            return
        self.seeds.enter(batch.step, index, phase.number)
        with self.watching(batch, phase) as around_forward:
            with TRACER.span("forward"), around_forward, self.arithmetic():
                goal = self._goal(phase, piece)
            named = [p for name in phase.of for p in self._parameters[name]]
            inputs = [p for p in named if p.requires_grad] or None  # a callback may freeze some
            with TRACER.span("backward"):
                goal.tensor.backward(self.start(goal, piece, batch.num_samples), inputs=inputs)
        self.watched.add(phase.name)
        tally.add(goal.tensor.detach(), goal.weight, goal.is_mean, goal.parts)

    def watching(
        self, batch: Batch, phase: Phase
    ) -> AbstractContextManager[AbstractContextManager[None]]:
        """Around each of a rank's pieces: the first one of each phase is watched."""
        if phase.name in self.watched:
            return _AS_IT_IS
        is_new = not batch.step and not self.watched
        return watch_first_piece(self.spread.model, self.plan, is_new)

    def _goal(self, phase: Phase, piece: Piece) -> Objective:
        if phase.loss is None:
            return objective(self.run, self.spread.forward(piece.inputs), piece)
        goal = objective_of(phase.loss(self.spread.model, piece.inputs, piece.target), piece)
        if (key := (phase.name, *phase.of)) not in self._known:
            refuse_independent(goal.tensor, phase, self._parameters)
            self._known.add(key)
        return goal

    @AS_RAISED
    def output(self, inputs: Any) -> Any:
        """The model's answer, without gradients; None on a rank that does not get to see it."""
        if self.spread.pipeline is not None:
            return self.spread.pipeline.forward(inputs)
        wait_for_parameters(self._strategy)
        with self.arithmetic():
            return self.spread.forward(inputs)

    def start(self, goal: Objective, piece: Piece, num_samples: int) -> Tensor:
        """The gradient of a piece's loss: a mean counts by its share of the batch, a sum by one."""
        seed = self.loss_scale.value
        if goal.is_mean:
            seed *= piece.num_samples / num_samples
        kind = seed, goal.tensor.dtype
        if kind not in self._starts:
            self._starts[kind] = goal.tensor.new_tensor(seed)
        return self._starts[kind]


class _PiecesInPipeline(PipelineHooks):
    """What a pipeline tells of the pieces of a round, and what becomes of their gradients."""

    def __init__(self, runner: PieceRunner, mesh: Mesh, strategy: Strategy):
        self.runner, self.buffers = runner, strategy.buffers
        spread = runner.spread
        if spread.stages is None:
            return
        named = dict(spread.model.named_parameters())
        self._parameters = {
            stage.index: [named[n] for n in stage.parameters if is_summed(named[n])]
            for stage in spread.stages.stages
        }
        self._tied = _groups_of_tied(spread, mesh)

    def round(
        self, batch: Batch, indices: range, pieces: Sequence[Piece], tally: LocalStep
    ) -> None:
        runner, run, num_samples = self.runner, self.runner.run, batch.num_samples
        self._step, self._indices = batch.step, indices
        self._sums: dict[int, PieceSum] = {}
        goals: dict[int, Objective] = {}

        def loss(output: Any, microbatch: int) -> Tensor:
            with runner.arithmetic():
                goal = objective(run, output, pieces[microbatch])
            # Without the graph, which goes with the microbatch's backward.
            goals[microbatch] = goal._replace(tensor=goal.tensor.detach())
            return goal.tensor * runner.start(goal, pieces[microbatch], num_samples)

        assert runner.spread.pipeline is not None
        with runner.watching(batch, PLAIN):
            runner.spread.pipeline.run([piece.inputs for piece in pieces], loss)
        runner.watched.add(PLAIN.name)
        for microbatch in sorted(goals):
            tally.add(*goals[microbatch])
        self._hand_out()

    def enter(self, microbatch: int, block: int) -> None:
        self.buffers.enter()
        self.runner.seeds.enter(self._step, self._indices[microbatch], block)

    def leave(self, stage: int, microbatch: int) -> None:
        self.buffers.leave(stage)

    def back(self, microbatch: int) -> None:
        self.runner.seeds.at(self._step, self._indices[microbatch])
        if PLAIN.name not in self.runner.watched:
            self._before = copy_small_buffers(self.runner.model)

    def computed(self, stage: int, microbatch: int) -> None:
        """Keep the pieces' gradients apart, to be added in the tree's order."""
        if PLAIN.name not in self.runner.watched:
            refuse_late_writes(self._before)
        if self.runner.plan.sums != "exact":
            return
        parameters = self._parameters[stage]
        if stage not in self._sums:
            self._sums[stage] = PieceSum(range(len(self._indices)))
        self._sums[stage].push([p.grad for p in parameters])
        for p in parameters:
            p.grad = None

    def _hand_out(self) -> None:
        """Make the sums over the round the gradients; tied parameters' over all who hold them."""
        for stage, sum_ in self._sums.items():
            for p, value in zip(self._parameters[stage], _root(sum_), strict=True):
                if value is not None:
                    p.grad = value if p.grad is None else p.grad.add_(value)
        for group, parameters in self._tied:
            for p in parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                group.all_reduce(p.grad).wait()


def _root(sum_: PieceSum) -> Values:
    num_pieces = sum(block.num_pieces for block in sum_.blocks)
    return total(sum_.rows, sum_.blocks, num_pieces)


def _groups_of_tied(
    spread: ParallelModel, mesh: Mesh
) -> list[tuple[Group, list[torch.nn.Parameter]]]:
    """The parameters that stages of several ranks use, by the ranks that hold them."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in sorted(spread.holders.items()):
        if len(ranks) > 1:
            by_ranks.setdefault(tuple(ranks), []).append(name)
    named = dict(spread.model.named_parameters())
    groups = [
        (mesh.pipeline.subgroup(ranks), [named[n] for n in names if named[n].requires_grad])
        for ranks, names in sorted(by_ranks.items())  # also those of others: see `part`
    ]
    return [found for found, ranks in zip(groups, sorted(by_ranks)) if mesh.pipeline.rank in ranks]
