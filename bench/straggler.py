"""Synchronous training with one slow device of four, against DDP.

The devices are emulated (`devices.py`): a sample takes its time, and five times as long on the last
device.

DDP gives every device a quarter of each batch and waits for the slow one; Shoal cuts the batch into
16 pieces and moves them to the fast ones. Both arms train the same batches, from the first step on,
so the same number of steps is the same loss; whole runs are timed, the steps before work has moved
included. They take turns, and DDP runs twice in each. No way to share the work could be faster than
4.0 times DDP: three devices at full speed and one at a fifth.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter

import msgspec
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from bench import harness, loops, ranks
from bench.devices import WIDTH, OnDevice
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.data.ledger import audit
from shoal.data.sources import tensors
from shoal.events.metrics_writer import step_record
from shoal.events.step import StepInfo
from shoal.training.run import Run, make_batches
from shoal.world import World

NUM_RANKS, NUM_PIECES, BATCH = 4, 16, 64
SAMPLE_S = 0.003  # a third of it forward
SLOWER, LIMIT = 5, 4.0
PLAN = f"data={NUM_RANKS} pieces={NUM_PIECES}"
FLOOR = 3.0


def make_run(rank: int) -> Run:
    torch.manual_seed(1)
    inputs = torch.randn(32 * BATCH, WIDTH)
    sample_s = SAMPLE_S / 3 * (SLOWER if rank == NUM_RANKS - 1 else 1)
    return Run(
        model=lambda: OnDevice(sample_s),
        loss=mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05),
        data=tensors(inputs, inputs.roll(1, 1)),
        batch_size=BATCH,
        steps=1 << 30,
    )


class Times(msgspec.Struct):
    """Seconds of whole runs, by arm and round, and what the ledger says of Shoal's."""

    seconds: dict[str, list[float]]
    counts: list[int]
    problems: list[str]


class Arms:
    """Whole runs. Every rank must call the same in the same order."""

    def __init__(self, world: World, num_steps: int):
        self._world, self._run, self._num_steps = world, make_run(world.rank), num_steps
        self._losses: dict[str, float] = {}
        self.counts: list[int] = []
        self.problems: list[str] = []

    def ddp(self) -> float:
        dist.barrier()
        started = perf_counter()
        model = DistributedDataParallel(self._run.make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        share = Share(self._world.rank, NUM_RANKS)
        loop = PlainLoop(self._run, model, optimizer, share, self._num_steps)
        loop.chunk()
        took = perf_counter() - started
        self._compare("ddp", loop.mean_loss())
        return took

    def shoal(self) -> float:
        with ExitStack() as stack:
            dist.barrier()
            started = perf_counter()
            loop = ShoalLoop(self._run, PLAN, self._world, stack, self._num_steps)
            infos: list[StepInfo] = []
            loop.trainer.hooks.append(infos.append)
            loop.chunk()
            took = perf_counter() - started
            self.counts = list(loop.trainer.mesh.counts or ())
        self._compare("shoal", loop.mean_loss())
        found = audit(map(step_record, infos), make_batches(self._run, NUM_PIECES))
        self.problems += found.problems
        if found.num_marked != self._num_steps:
            self.problems.append(f"{self._num_steps - found.num_marked} steps were not checked")
        return took

    def _compare(self, arm: str, loss: float) -> None:
        self._losses[arm] = loss
        loops.check_alike(self._losses)


def measure_ranks(world: World, length: str) -> Times:
    """Every rank must call it."""
    num_rounds, num_steps = (2, 40) if length == "quick" else (4, 100)
    arms = Arms(world, num_steps)
    by_name = {"ddp": arms.ddp, "shoal": arms.shoal, "again": arms.ddp}
    seconds = harness.interleave(by_name, num_rounds, num_warm_up=0)
    return Times(seconds, arms.counts, arms.problems)


def measure(quick: bool) -> Iterator[Row]:
    times = ranks.start("straggler", NUM_RANKS, Times, "quick" if quick else "full")
    seconds = times.seconds
    against = harness.spread(harness.ratios(seconds["ddp"], seconds["shoal"]))
    own_s = harness.spread(seconds["shoal"]).median
    exact = "; ".join(times.problems) or "every global batch exactly once, by the ledger"
    yield Row(
        name="straggler",
        value=against.median if not times.problems else None,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"DDP {harness.spread(seconds['ddp']).median:.2f} s",
        ceiling=f"{LIMIT:.1f}x, work shared by speed at no cost",
        control=harness.spread(harness.ratios(seconds["again"], seconds["ddp"])).median,
        note=f"Shoal {own_s:.2f} s; pieces by rank {times.counts}; {exact}; emulated devices",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_ranks)
    else:
        harness.main(measure)
