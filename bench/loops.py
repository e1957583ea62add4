"""Training loops under the clock: one written by hand, and Shoal's whole trainer.

Both train a run's batches in order on the group that stands, a chunk of steps at a time, between
two barriers, and say how long a step took. What the hand-written one trains (DDP, FSDP2, a cut
model) is the caller's; the trainer has the hooks that a rank of `shoal train` has.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench import harness
from shoal.comm.mesh import LauncherSeat
from shoal.errors import PlanError
from shoal.events.meters import StepTotals
from shoal.events.metrics_writer import MetricsWriter
from shoal.plans.plan import Plan
from shoal.sync.server.lookups import empty_tables
from shoal.training.build import build_model
from shoal.training.run import Run, make_batches, resolve
from shoal.training.trainer import Trainer
from shoal.world import World


class Share(NamedTuple):
    """Which piece of each batch a loop trains on, when it is cut into so many."""

    piece: int
    num_pieces: int


class PlainLoop:
    """A hand-written loop over a share of each batch."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        share: Share,
        num_steps: int,
    ):
        self.batches, self.piece = make_batches(run, share.num_pieces), share.piece
        self.model, self.optimizer, self.loss_of = model, optimizer, run.loss
        self.num_steps, self.step, self.loss = num_steps, 0, 0.0

    def chunk(self) -> float:
        """Seconds a step, over a chunk."""
        pieces = [self.batches.at(self.step + k).piece(self.piece) for k in range(self.num_steps)]
        dist.barrier()
        started = perf_counter()
        for piece in pieces:
            self.optimizer.zero_grad()
            loss = self.loss_of(self.model(piece.inputs), piece.target)
            loss.backward()
            self.optimizer.step()
        dist.barrier()
        seconds = perf_counter() - started
        self.step, self.loss = self.step + self.num_steps, loss.item()
        return seconds / self.num_steps

    def mean_loss(self) -> float:
        """Over the shares of all ranks, of the last step. Every rank must call it."""
        summed = torch.tensor([self.loss])
        dist.all_reduce(summed)
        return summed.item() / dist.get_world_size()


class ShoalLoop:
    """Shoal's trainer on the group that stands, for as long as the stack is open."""

    def __init__(
        self,
        run: Run,
        plan: str,
        world: World,
        stack: ExitStack,
        num_steps: int,
        seat: LauncherSeat | None = None,
    ):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        resolved = resolve(run, plan, world.num_ranks)
        prepared = build_model(run, resolved)
        if resolved.num_servers:
            empty_tables(prepared.model)
        self.trainer = Trainer(run, resolved, seat or LauncherSeat(world), built=prepared)
        scribe = MetricsWriter(folder / "metrics.jsonl", lambda: self.trainer.writes_record)
        self.trainer.hooks += [StepTotals().add, scribe]
        stack.callback(scribe.close)
        stack.enter_context(self.trainer)
        self.steps, self.num_steps, self.loss = iter(self.trainer), num_steps, 0.0

    def chunk(self) -> float:
        """Seconds a step, over a chunk."""
        dist.barrier()
        started = perf_counter()
        for info in islice(self.steps, self.num_steps):
            self.loss = info.loss
        dist.barrier()
        return (perf_counter() - started) / self.num_steps

    def mean_loss(self) -> float:
        return self.loss


def refusal(plan: str) -> str:
    """Why this Shoal does not take a plan; the empty string if it does."""
    try:
        Plan.parse(plan).refuse_missing()
    except PlanError as error:
        return str(error)
    return ""


def best_of(loops: Mapping[str, PlainLoop], num_rounds: int) -> str:
    """The peer's better setting here. Rank 0 decides for all."""
    found = harness.interleave({n: loop.chunk for n, loop in loops.items()}, num_rounds)
    names = list(loops)
    best = min(range(len(names)), key=lambda i: harness.spread(found[names[i]]).median)
    told = torch.tensor([best])
    dist.broadcast(told, 0)
    return names[int(told.item())]


def check_alike(losses: Mapping[str, float]) -> None:
    """Arms that train something else are no peers."""
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        raise RuntimeError(
            f"The arms ended with the losses {dict(losses)}. All must train the same; look at what "
            "changed in the trainer."
        )
