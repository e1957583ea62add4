"""Comparing a run out of lockstep with a replay of it in one process.

Which parameters a worker sees depends on who was how fast, so there is no one result to compare
with. But who pulled which version, and in which order servers stepped, is on record: played again
in that order, every loss and every weight must come out the same. Each worker is a replica of the
reference that computes and does not step; each server is a model and an optimizer that step on what
they are given, of which only the server's own elements count. Under local steps a worker steps for
itself and gives a server what a window came to.

If the bits are not the same, the run is played twice more, as it was and with its first weights
moved by an ulp: how far the two come apart is the model's own rounding (`rounding.py`).
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

from shoal.data.split import share
from shoal.errors import RecipeError
from shoal.numerics import schedules
from shoal.numerics.precision import Precision
from shoal.parallel.boxes import whole_box
from shoal.plans.plan import Plan
from shoal.sync.server.anchor import outer_of
from shoal.sync.server.shard import layout_of, trained
from shoal.training.run import Run, make_batches
from shoal.verify.compare import PATIENCE_S, Place, Step, Verdict, finished, note, path_of
from shoal.verify.reference import Replica
from shoal.verify.reference_outer import Outer
from shoal.verify.rounding import TIMES, apart, last_bits, move, reach

NUM_TWINS = 3


class Played(NamedTuple):
    """A worker's step that was computed, and is not applied by all servers yet."""

    step: int
    gradients: list[Tensor | None]
    waiting: set[int]  # servers


class Master:
    """A server: versions of the parameters, one after each update."""

    def __init__(self, run: Run, plan: Plan):
        self.run, self.plan, self.num_steps = run, plan, run.num_steps()
        self.model: nn.Module = run.make_model()
        self.optimizer: torch.optim.Optimizer
        if plan.local_steps > 1:
            self.model, self.optimizer = outer_of(self.model, plan)
        else:
            self.optimizer = run.make_optimizer(self.model)
        schedules.remember_rates(self.optimizer)
        self.parameters = [p for _, p in trained(self.model)]
        self.versions: dict[int, list[Tensor]] = {0: self._copy()}
        self.version = 0

    def _copy(self) -> list[Tensor]:
        """Elements in the order of their numbers, by which servers know them."""
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


class Trace(NamedTuple):
    """The versions that servers gave a worker, made of its step, and gave next."""

    pulled: list[int]
    applied: list[int]
    next: list[int]


Trail = Callable[[int, int], Trace | None]  # of a rank's step; None if it is not done yet


class Made(NamedTuple):
    """A loss or a weight that came out of a replay."""

    place: Place
    value: Tensor


class Records:
    """What ranks wrote down, read as it is asked for, compared, and deleted."""

    def __init__(self, plan: Plan, directory: Path):
        self.plan, self.directory = plan, directory
        self.traces: dict[tuple[int, int], Trace] = {}
        self.verdict = Verdict(allowed=TIMES[Precision(plan.precision)], is_replay=True)
        self.differences: dict[Place, float] = {}
        self._told: dict[tuple[int, int], Step] = {}
        self._deadline = time.monotonic() + PATIENCE_S

    def __call__(self, rank: int, step: int) -> Trace | None:
        if self._told.pop((rank, step - 1), None) is not None:  # all of it is compared
            path_of(self.directory, step - 1, rank).unlink()
        path = path_of(self.directory, step, rank)
        if (rank, step) not in self.traces and path.exists():
            told = self._told[rank, step] = Step(load_file(path))
            self.traces[rank, step] = Trace(told.pulled, told.applied, told.next)
            self._deadline = time.monotonic() + PATIENCE_S
        return self.traces.get((rank, step))

    def wait(self) -> None:
        if finished(self.directory).exists() or time.monotonic() > self._deadline:
            raise RecipeError("The plan's run ended or hangs before all steps were written.")
        time.sleep(0.002)

    def compare(self, made: Made) -> None:
        place, value = made
        told = self._told[place.rank, place.step]
        parts = told.parts("held", place.name)
        if place.what == "loss":
            parts = [(whole_box(told.loss.shape), told.loss)]
        for block, theirs in parts:
            note(self.verdict, place, theirs, block.of(value), reach(value))
            known = self.differences.get(place, 0.0)
            self.differences[place] = max(known, apart(theirs, block.of(value)))


def compare_replay(run: Run, plan: Plan, directory: Path) -> Verdict:
    """Play a run again beside it, and judge what is not the same by its rounding."""
    try:
        records = Records(plan, directory)
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


def _judge(run: Run, plan: Plan, records: Records) -> None:
    """Find the first difference that is more than what moving weights makes."""
    precision, verdict = Precision(plan.precision), records.verdict
    plain, *twins = [
        Replay(run if not seed else _moved(run, precision, seed), plan, _kept(records))
        for seed in range(1 + NUM_TWINS)
    ]
    weights = plain.workers[0].parameters
    for (place, own), *others in zip(plain.play(), *(twin.play() for twin in twins), strict=True):
        difference = records.differences.get(place, 0.0)
        spread = max(apart(other.value, own) for other in others)
        rounding = spread + last_bits(place.what, own, weights, precision)
        verdict.weigh(place, difference, rounding, reach(own))


def _kept(records: Records) -> Trail:
    return lambda rank, step: records.traces.get((rank, step))


def _moved(run: Run, precision: Precision, seed: int) -> Run:
    def model() -> nn.Module:
        made = run.model()
        move(made, precision, 1, seed)
        return made

    return dataclasses.replace(run, model=model)


class Replay:
    """Of a run, along the trail that it left."""

    def __init__(self, run: Run, plan: Plan, trail: Trail):
        self.run, self.plan, self.trail = run, plan, trail
        self.masters = [Master(run, plan) for _ in range(plan.num_servers)]
        self.shares = [share(r, plan.num_ranks, plan.num_pieces) for r in range(plan.num_ranks)]
        self.workers = [Replica(run, plan, pieces) for pieces in self.shares]
        self.outers = [Outer([worker.model], plan, run.num_steps()) for worker in self.workers]
        for worker in self.workers if plan.local_steps == 1 else ():
            worker.optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
        self.names = [name for name, _ in trained(self.workers[0].model)]
        self.batches = make_batches(run, plan.num_pieces)
        first = self.masters[0]
        self.layout = layout_of(first.model, first.optimizer, plan.num_servers)
        self.next_step = [1] * plan.num_ranks
        self.played: dict[int, Played] = {}
        self.told: dict[int, Trace] = {}
        self.made: list[Made] = []  # and not looked at yet
        self.seen = [[0] * plan.num_servers for _ in self.workers]  # versions, last by each rank

    def play(self, wait: Callable[[], None] | None = None) -> Iterator[Made]:
        """All that comes of it, until every rank is at the end; waits where no step is there."""
        turns = [functools.partial(self._compute, rank) for rank in range(self.plan.num_ranks)]
        turns += [functools.partial(self._apply, server) for server in range(len(self.masters))]
        while self.played or min(self.next_step) <= self.run.num_steps():
            moved = False
            for turn in turns:
                moved = turn() or moved
                yield from self.made
                self.made.clear()
            if not moved:
                assert wait is not None, "a step is missing that was played before"
                wait()

    def _compute(self, rank: int) -> bool:
        """Play a worker's next step. The parameters that it saw are what it pulled last."""
        step = self.next_step[rank]
        if rank in self.played or step > self.run.num_steps():
            return False
        told = self.trail(rank, step)
        if told is None:
            return False
        self.told[rank], worker = told, self.workers[rank]
        if (step - 1) % self.plan.local_steps == 0:
            self._set(worker, self.seen[rank])
            self.outers[rank].begin()
        loss, weight = worker.step(self.batches.at(step - 1))
        value = torch.tensor([loss / weight], dtype=torch.float64)
        self.made.append(Made(Place(step, rank, "loss", ""), value))
        if step % self.plan.local_steps and step < self.run.num_steps():
            self._tell_weights(rank, step, (p.detach().clone() for p in worker.parameters))
            self._leave(rank, self.seen[rank])
            return True
        gradients = [None if p.grad is None else p.grad.clone() for p in worker.parameters]
        if self.plan.local_steps > 1:
            learnt = self.outers[rank].learnt()
            gradients = [learnt[p] for p in worker.parameters]
        self.played[rank] = Played(step, gradients, set(range(self.plan.num_servers)))
        return True

    def _apply(self, server: int) -> bool:
        """Let a server step on what it stepped on next, and look at weights pulled from it."""
        moved = False
        for rank, played in list(self.played.items()):
            told, master = self.told[rank], self.masters[server]
            if server in played.waiting and told.applied[server] == master.version:
                factor = self._factor(rank, told, server)
                master.apply(played.step, played.gradients, factor)
                played.waiting.discard(server)
                moved = True
            if not played.waiting and self._are_there(told.next):
                self._tell_weights(rank, played.step, self._composed(told.next))
                self._leave(rank, told.next)
                del self.played[rank]
                moved = True
        return moved

    def _factor(self, rank: int, told: Trace, server: int) -> float:
        """Of the learning rate: the share of the batch, and what the plan says beside."""
        share = self.plan.rate_factors[rank] * len(self.shares[rank]) / self.plan.num_pieces
        if self.plan.damping == "none":
            return share
        num_updates = told.applied[server] - told.pulled[server]
        return share / (1 + num_updates / self.plan.num_ranks)

    def _tell_weights(self, rank: int, step: int, weights: Iterable[Tensor]) -> None:
        for name, value in zip(self.names, weights, strict=True):
            self.made.append(Made(Place(step, rank, "weight", name), value))

    def _leave(self, rank: int, seen: list[int]) -> None:
        self.next_step[rank] += 1
        self.seen[rank] = seen
        del self.told[rank]
        for server, master in enumerate(self.masters):
            master.forget(min(versions[server] for versions in self.seen))

    def _are_there(self, versions: Sequence[int]) -> bool:
        return all(m.version >= v for m, v in zip(self.masters, versions, strict=True))

    @torch.no_grad()
    def _set(self, worker: Replica, versions: Sequence[int]) -> None:
        for p, value in zip(worker.parameters, self._composed(versions), strict=True):
            p.copy_(value)

    def _composed(self, versions: Sequence[int]) -> Iterator[Tensor]:
        """The parameters, each element of its server's version."""
        parts = [master.versions[v] for master, v in zip(self.masters, versions, strict=True)]
        made = [value.clone() for value in parts[0]]
        for key, server in enumerate(self.layout.holders):
            for s in self.layout.segments(key):
                where = slice(s.start, s.stop)
                made[s.parameter].view(-1)[where] = parts[server][s.parameter].view(-1)[where]
        yield from made
