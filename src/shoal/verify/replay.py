"""Compare a run out of lockstep with a replay of it in one process.

The parameters that a worker sees depend on timing, so there is no single result to compare with.
But which version each worker pulled, and in which order servers stepped, is recorded: replayed in
that order, every loss and every weight must be the same. Each worker is a replica of the reference
that computes and does not step; each server is a model and an optimizer that step on the gradients,
of which only the server's own elements count. Under local steps a worker steps itself and gives the
servers the outer gradient of a window.

If the bits differ, the run is replayed again, as it was and with its initial weights moved by an
ulp: how far these replays diverge is the model's own rounding (`rounding.py`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.comm.mesh import ranks_by_replica
from shoal.data.split import share
from shoal.errors import RecipeError
from shoal.numerics import schedules
from shoal.numerics.precision import Precision, PrecisionSchedule
from shoal.parallel.apply import Survey
from shoal.parallel.boxes import Box, whole_box
from shoal.parallel.layout import slices_of_run
from shoal.plans.plan import Plan
from shoal.sync.server.anchor import make_outer
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.parts import part_on_servers
from shoal.sync.server.shard import layout_of, served_parameters
from shoal.training.build import build_model
from shoal.training.run import Run, make_batches
from shoal.verify.compare import (
    PATIENCE_S,
    StepRecord,
    TensorLocation,
    VerifyResult,
    finished,
    record_difference,
    step_path,
)
from shoal.verify.reference import Replica
from shoal.verify.reference_outer import ReferenceOuter, pipeline_ranks
from shoal.verify.rounding import TOLERANCE, largest_difference, largest_finite, last_bits, perturb

NUM_TWINS = 3


class PendingStep(NamedTuple):
    """A worker's step that is computed, but not applied by all servers yet."""

    step: int
    gradients: list[Tensor | None]
    waiting: set[int]  # servers


class ReplayServer:
    """A server: the versions of its parameters, one per update."""

    def __init__(self, run: Run, plan: Plan):
        self.run, self.plan, self.num_steps = run, plan, run.num_steps()
        self.model: nn.Module = run.make_model()
        self.optimizer: torch.optim.Optimizer
        if plan.local_steps > 1:
            self.model, self.optimizer = make_outer(self.model, plan)
        else:
            self.optimizer = run.make_optimizer(self.model)
        schedules.remember_rates(self.optimizer)
        self.parameters = [p for _, p in served_parameters(self.model)]
        self.versions: dict[int, list[Tensor]] = {0: self._copy()}
        self.version = 0

    def _copy(self) -> list[Tensor]:
        """Contiguous, since servers index elements in row-major order."""
        return [p.detach().clone(memory_format=torch.contiguous_format) for p in self.parameters]

    def apply(self, step: int, gradients: Sequence[Tensor | None], factor: float) -> None:
        """`step` counts from 1."""
        if self.plan.local_steps > 1:
            is_short = step % self.plan.local_steps
            rate, momentum = (1.0, 0.0) if is_short else self.plan.outer_rates
            for group in self.optimizer.param_groups:
                group.update(lr=rate * factor, momentum=momentum)
        else:
            schedule = self.run.make_schedule()
            rate = 1.0 if schedule is None else schedule(step - 1, self.num_steps)
            schedules.apply(self.optimizer, rate * factor)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        self.optimizer.step()
        self.version += 1
        self.versions[self.version] = self._copy()

    def forget(self, before: int) -> None:
        for version in [version for version in self.versions if version < before]:
            del self.versions[version]


class ServedPart(NamedTuple):
    """A part of the model that has servers of its own."""

    layout: ServerLayout
    boxes: list[list[tuple[str, Box]]]  # by key, what it has of which parameters of the model


def parts_of(run: Run, plan: Plan) -> list[ServedPart]:
    """Those of a plan; a single one if no replica is cut."""
    survey = Survey()
    if plan.num_parts > 1:
        built = build_model(run, plan)
        built.seeds.close()
        survey = built.survey
    found = []
    for part in range(plan.num_parts):
        whole: nn.Module = run.make_model()
        optimizer: torch.optim.Optimizer = run.make_optimizer(whole)
        model, holding = part_on_servers(whole, optimizer, plan, survey, part)
        if plan.local_steps > 1:
            model, optimizer = make_outer(model, plan)
        layout, named = (
            layout_of(model, optimizer, plan.num_servers // plan.num_parts),
            served_parameters(model),
        )
        boxes = [
            [
                (name, Box(own.offset, tuple(own.tensor.shape)))
                for s in layout.segments(key)
                for name, p in [named[s.parameter]]
                if holding.is_first(name)
                for own in slices_of_run(name, p.shape, s.start, p.new_empty(s.length), holding)
            ]
            for key in range(len(layout.keys))
        ]
        found.append(ServedPart(layout, boxes))
    return found


class VersionTrace(NamedTuple):
    """The versions that a worker pulled, that its step made, and that it pulled next."""

    pulled: list[int]
    applied: list[int]
    next: list[int]


TraceSource = Callable[[int, int], VersionTrace | None]  # by worker and step; None: not done yet


class ReplayedTensor(NamedTuple):
    """A loss or a weight of the replay."""

    place: TensorLocation
    value: Tensor


class StepRecords:
    """The steps that ranks recorded: read on demand, compared, deleted."""

    def __init__(self, plan: Plan, directory: Path):
        self.plan, self.directory = plan, directory
        self.traces: dict[tuple[int, int], VersionTrace] = {}
        self.verdict = VerifyResult(
            allowed=TOLERANCE[PrecisionSchedule.parse(plan.precision).lowest], is_replay=True
        )
        self.differences: dict[TensorLocation, float] = {}
        # By replica and step, of each of its ranks.
        self._steps: dict[tuple[int, int], list[StepRecord]] = {}
        shape = plan.pipeline, plan.num_apart, plan.num_within, plan.tensor
        self._ranks = ranks_by_replica(shape)
        width = plan.num_within * plan.tensor
        # Those of a replica that speak with servers, each with those of its part.
        self._speakers = [p * width + t for p in range(plan.pipeline) for t in range(plan.tensor)]
        self._deadline = time.monotonic() + PATIENCE_S

    def __call__(self, worker: int, step: int) -> VersionTrace | None:
        if self._steps.pop((worker, step - 1), None) is not None:  # it is compared
            for path in self._paths(worker, step - 1):
                path.unlink()
        paths = self._paths(worker, step)
        if (worker, step) not in self.traces and all(path.exists() for path in paths):
            found = self._steps[worker, step] = [StepRecord(load_file(path)) for path in paths]
            speakers = [found[i] for i in self._speakers]
            kinds = ([getattr(s, kind) for s in speakers] for kind in ("pulled", "applied", "next"))
            # Servers of the parts take turns.
            self.traces[worker, step] = VersionTrace(
                *([v for turn in zip(*by_part, strict=True) for v in turn] for by_part in kinds)
            )
            self._deadline = time.monotonic() + PATIENCE_S
        return self.traces.get((worker, step))

    def _paths(self, worker: int, step: int) -> list[Path]:
        return [step_path(self.directory, step, rank) for rank in self._ranks[worker]]

    def wait(self) -> None:
        if finished(self.directory).exists() or time.monotonic() > self._deadline:
            raise RecipeError("The plan's run ended or hangs before all steps were written.")
        time.sleep(0.002)

    def compare(self, made: ReplayedTensor) -> None:
        place, value = made
        parts = []
        for recorded in self._steps[place.rank, place.step]:
            of_loss = [(whole_box(recorded.loss.shape), recorded.loss)]
            parts += of_loss if place.what == "loss" else recorded.parts("held", place.name)
        for block, theirs in parts:
            record_difference(self.verdict, place, theirs, block.of(value), largest_finite(value))
            known = self.differences.get(place, 0.0)
            self.differences[place] = max(known, largest_difference(theirs, block.of(value)))


def compare_replay(run: Run, plan: Plan, directory: Path) -> VerifyResult:
    """Replay a run while it trains, and judge differences by the model's rounding."""
    try:
        records = StepRecords(plan, directory)
        replay = Replay(run, plan, records)
        for made in replay.play(records.wait):
            records.compare(made)
            if not records.verdict.passed:
                break
        records.verdict.num_steps = min(replay.next_step) - 1
    finally:
        finished(directory).touch()
    if records.verdict.passed and not records.verdict.identical:
        _judge(run, plan, records)
    return records.verdict


def _judge(run: Run, plan: Plan, records: StepRecords) -> None:
    """Find the first difference that is larger than the effect of moved weights."""
    precision, verdict = PrecisionSchedule.parse(plan.precision).lowest, records.verdict
    plain, *twins = [
        Replay(run if not seed else _moved(run, precision, seed), plan, _kept(records))
        for seed in range(1 + NUM_TWINS)
    ]
    weights = plain.workers[0].parameters
    for (place, own), *others in zip(plain.play(), *(twin.play() for twin in twins), strict=True):
        difference = records.differences.get(place, 0.0)
        spread = max(largest_difference(other.value, own) for other in others)
        rounding = spread + last_bits(place.what, own, weights, precision)
        verdict.weigh(place, difference, rounding, largest_finite(own))


def _kept(records: StepRecords) -> TraceSource:
    return lambda rank, step: records.traces.get((rank, step))


def _moved(run: Run, precision: Precision, seed: int) -> Run:
    def model() -> nn.Module:
        made = run.model()
        perturb(made, precision, 1, seed)
        return made

    return dataclasses.replace(run, model=model)


class Replay:
    """A replay of a run, in the order of its recorded traces."""

    def __init__(self, run: Run, plan: Plan, traces: TraceSource):
        self.run, self.plan, self.traces = run, plan, traces
        self.servers = [ReplayServer(run, plan) for _ in range(plan.num_servers)]
        self.shares = [share(r, plan.num_apart, plan.num_pieces) for r in range(plan.num_apart)]
        self.workers = [Replica(run, plan, pieces) for pieces in self.shares]
        steps, ranks = run.num_steps(), pipeline_ranks(run, plan)
        self.outers = [ReferenceOuter([w.model], plan, steps, ranks) for w in self.workers]
        for worker in self.workers if plan.local_steps == 1 else ():
            worker.optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
        self.names = [name for name, _ in served_parameters(self.workers[0].model)]
        self.batches = make_batches(run, plan.num_pieces)
        self.parts = parts_of(run, plan)
        self.next_step = [1] * plan.num_apart
        self.pending: dict[int, PendingStep] = {}
        self.trace_of: dict[int, VersionTrace] = {}
        self.made: list[ReplayedTensor] = []  # not yielded yet
        self.seen = [[0] * plan.num_servers for _ in self.workers]  # versions, last by each rank

    def play(self, wait: Callable[[], None] | None = None) -> Iterator[ReplayedTensor]:
        """Yield all losses and weights, until every rank is done; waits for missing steps."""
        turns = [functools.partial(self._compute, rank) for rank in range(self.plan.num_apart)]
        turns += [functools.partial(self._apply, server) for server in range(len(self.servers))]
        while self.pending or min(self.next_step) <= self.run.num_steps():
            moved = False
            for turn in turns:
                moved = turn() or moved
                yield from self.made
                self.made.clear()
            if not moved:
                assert wait is not None, "a step is missing that was replayed before"
                wait()

    def _compute(self, rank: int) -> bool:
        """Compute a worker's next step, on the parameters that it pulled last."""
        step = self.next_step[rank]
        if rank in self.pending or step > self.run.num_steps():
            return False
        trace = self.traces(rank, step)
        if trace is None:
            return False
        self.trace_of[rank], worker = trace, self.workers[rank]
        if (step - 1) % self.plan.local_steps == 0:
            self._set(worker, self.seen[rank])
            self.outers[rank].begin()
        loss, weight = worker.step(self.batches.at(step - 1))
        value = torch.tensor([loss / weight], dtype=torch.float64)
        self.made.append(ReplayedTensor(TensorLocation(step, rank, "loss", ""), value))
        if step % self.plan.local_steps and step < self.run.num_steps():
            self._tell_weights(rank, step, (p.detach().clone() for p in worker.parameters))
            self._leave(rank, self.seen[rank])
            return True
        gradients = [None if p.grad is None else p.grad.clone() for p in worker.parameters]
        if self.plan.local_steps > 1:
            by_parameter = self.outers[rank].outer_gradients()
            gradients = [by_parameter[p] for p in worker.parameters]
        self.pending[rank] = PendingStep(step, gradients, set(range(self.plan.num_servers)))
        return True

    def _apply(self, server: int) -> bool:
        """Apply a server's next update, and compare the weights pulled from it."""
        moved = False
        for rank, pending in list(self.pending.items()):
            trace, copy = self.trace_of[rank], self.servers[server]
            if server in pending.waiting and trace.applied[server] == copy.version:
                factor = self._factor(rank, trace, server)
                copy.apply(pending.step, pending.gradients, factor)
                pending.waiting.discard(server)
                moved = True
            if not pending.waiting and self._are_there(trace.next):
                self._tell_weights(rank, pending.step, self._composed(trace.next))
                self._leave(rank, trace.next)
                del self.pending[rank]
                moved = True
        return moved

    def _factor(self, rank: int, trace: VersionTrace, server: int) -> float:
        """The factor of the learning rate: the share of the batch, `rates` and `damping`."""
        share = self.plan.rate_factors[rank] * len(self.shares[rank]) / self.plan.num_pieces
        if self.plan.damping == "none":
            return share
        num_updates = trace.applied[server] - trace.pulled[server]
        return share / (1 + num_updates / self.plan.num_apart)

    def _tell_weights(self, rank: int, step: int, weights: Iterable[Tensor]) -> None:
        for name, value in zip(self.names, weights, strict=True):
            self.made.append(ReplayedTensor(TensorLocation(step, rank, "weight", name), value))

    def _leave(self, rank: int, seen: list[int]) -> None:
        self.next_step[rank] += 1
        self.seen[rank] = seen
        del self.trace_of[rank]
        for server, copy in enumerate(self.servers):
            copy.forget(min(versions[server] for versions in self.seen))

    def _are_there(self, versions: Sequence[int]) -> bool:
        return all(m.version >= v for m, v in zip(self.servers, versions, strict=True))

    @torch.no_grad()
    def _set(self, worker: Replica, versions: Sequence[int]) -> None:
        for p, value in zip(worker.parameters, self._composed(versions), strict=True):
            p.copy_(value)

    def _composed(self, versions: Sequence[int]) -> Iterator[Tensor]:
        """The parameters, each element from its server's version."""
        parts = [copy.versions[v] for copy, v in zip(self.servers, versions, strict=True)]
        made = dict(zip(self.names, (value.clone() for value in parts[0]), strict=True))
        numbers = {name: number for number, name in enumerate(self.names)}
        for number, part in enumerate(self.parts):
            for holder, boxes in zip(part.layout.holders, part.boxes, strict=True):
                values = parts[holder * len(self.parts) + number]
                for name, box in boxes:
                    box.of(made[name]).copy_(box.of(values[numbers[name]]))
        yield from made.values()
