"""Synchronous training with one slow device of four, against DDP.

The devices are emulated (`devices.py`): a sample takes its time, and five times as long on the last
device.

DDP gives every device a quarter of each batch and waits for the slow one; Shoal cuts the batch into
16 pieces and moves them to the fast ones. Both arms train the same batches, from the first step on,
so the same number of steps is the same loss; whole runs are timed, the steps before work has moved
included. No way to share the work could be faster than 4.0 times DDP: three devices at full speed
and one at a fifth.
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
from shoal.hooks import StepInfo
from shoal.metrics.scribe import as_record
from shoal.run import Run, make_batches
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
    """Seconds of whole runs, and what the ledger says of Shoal's."""

    ddp: list[float]
    shoal: list[float]
    counts: list[int]
    problems: list[str]


def train_ddp(run: Run, world: World, num_steps: int) -> PlainLoop:
    model = DistributedDataParallel(run.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop = PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), num_steps)
    loop.chunk()
    return loop


def measure_ranks(world: World, length: str) -> Times:
    """Every rank must call it."""
    run = make_run(world.rank)
    num_rounds, num_steps = (1, 40) if length == "quick" else (3, 100)
    times = Times([], [], [], [])
    for _ in range(num_rounds):
        dist.barrier()
        started = perf_counter()
        ddp = train_ddp(run, world, num_steps)
        times.ddp.append(perf_counter() - started)
        with ExitStack() as stack:
            dist.barrier()
            started = perf_counter()
            shoal = ShoalLoop(run, PLAN, world, stack, num_steps)
            infos: list[StepInfo] = []
            shoal.trainer.hooks.append(infos.append)
            shoal.chunk()
            times.shoal.append(perf_counter() - started)
            times.counts = list(shoal.trainer.mesh.counts or ())
        loops.check_alike({"ddp": ddp.mean_loss(), "shoal": shoal.mean_loss()})
        found = audit(map(as_record, infos), make_batches(run, NUM_PIECES))
        times.problems += found.problems
        if found.num_marked != num_steps:
            times.problems.append(f"{num_steps - found.num_marked} steps were not checked")
    return times


def measure(quick: bool) -> Iterator[Row]:
    times = ranks.start("straggler", NUM_RANKS, Times, "quick" if quick else "full")
    against = harness.spread(harness.ratios(times.ddp, times.shoal))
    own_s = harness.spread(times.shoal).median
    exact = "; ".join(times.problems) or "every global batch exactly once, by the ledger"
    yield Row(
        name="straggler",
        value=against.median if not times.problems else None,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"DDP {harness.spread(times.ddp).median:.2f} s",
        ceiling=f"{LIMIT:.1f}x, work shared by speed at no cost",
        note=f"Shoal {own_s:.2f} s; pieces by rank {times.counts}; {exact}; emulated devices",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_ranks)
    else:
        harness.main(measure)
