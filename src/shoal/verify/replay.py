"""Comparing a run out of lockstep with a replay of it in one process.

Which parameters a worker sees depends on who was how fast, so there is no one result to compare
with. But who pulled which version, and in which order servers stepped, is on record: played again
in that order, every loss and every weight must come out the same. Each worker is a replica of the
reference that computes and does not step; each server is a model and an optimizer that step on what
they are given, of which only the server's own elements count. Under local steps a worker steps for
itself and gives a server what a window came to.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.data.split import share
from shoal.errors import RecipeError
from shoal.numerics import schedules
from shoal.numerics.precision import tolerance
from shoal.plan import Plan
from shoal.reference import Replica
from shoal.reference_outer import Outer
from shoal.run import Run, make_batches
from shoal.sync.server.anchor import outer_of
from shoal.sync.server.shard import layout_of, trained
from shoal.verify.compare import PATIENCE_S, Place, Step, Verdict, finished, note, path_of


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


class Replay:
    def __init__(self, run: Run, plan: Plan, directory: Path):
        self.run, self.plan, self.directory = run, plan, directory
        limit = tolerance(plan.precision)
        self.verdict = Verdict(limit, limit, is_replay=True)
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
        self.told: dict[int, Step] = {}
        self.seen = [[0] * plan.num_servers for _ in self.workers]  # versions, last by each rank

    def play(self) -> Verdict:
        """Until all ranks are at the end, or one differs."""
        deadline = time.monotonic() + PATIENCE_S
        while self.verdict.passed and (self.played or min(self.next_step) <= self.run.num_steps()):
            moved = [self._compute(rank) for rank in range(self.plan.num_ranks)]
            moved += [self._apply(server) for server in range(self.plan.num_servers)]
            if any(moved):
                deadline = time.monotonic() + PATIENCE_S
            elif finished(self.directory).exists() or time.monotonic() > deadline:
                raise RecipeError("The plan's run ended or hangs before all steps were written.")
            else:
                time.sleep(0.002)
        return self.verdict

    def _compute(self, rank: int) -> bool:
        """Play a worker's next step. The parameters that it saw are what it pulled last."""
        step = self.next_step[rank]
        path = path_of(self.directory, step, rank)
        if rank in self.played or step > self.run.num_steps() or not path.exists():
            return False
        told = self.told.setdefault(rank, Step(load_file(path)))
        worker = self.workers[rank]
        if (step - 1) % self.plan.local_steps == 0:
            self._set(worker, self.seen[rank])
            self.outers[rank].begin()
        loss, weight = worker.step(self.batches.at(step - 1))
        mine = torch.tensor([loss / weight], dtype=torch.float64)
        note(self.verdict, Place(step, rank, "loss", ""), told.loss, mine)
        if step % self.plan.local_steps and step < self.run.num_steps():
            self._compare_weights(rank, step, told, worker.parameters)
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
                self._compare_weights(rank, played.step, told, self._composed(told.next))
                self._leave(rank, told.next)
                del self.played[rank]
                moved = True
        return moved

    def _factor(self, rank: int, told: Step, server: int) -> float:
        """Of the learning rate: the share of the batch, and what the plan says beside."""
        share = self.plan.rate_factors[rank] * len(self.shares[rank]) / self.plan.num_pieces
        if self.plan.damping == "none":
            return share
        num_updates = told.applied[server] - told.pulled[server]
        return share / (1 + num_updates / self.plan.num_ranks)

    def _compare_weights(self, rank: int, step: int, told: Step, weights: Iterable[Tensor]) -> None:
        for name, mine in zip(self.names, weights, strict=True):
            for block, theirs in told.parts("held", name):
                note(self.verdict, Place(step, rank, "weight", name), theirs, block.of(mine))
        self.verdict.num_steps = min(self.next_step)

    def _leave(self, rank: int, seen: list[int]) -> None:
        path_of(self.directory, self.next_step[rank], rank).unlink()
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
