"""`async-straggler`: time to a loss when workers do not wait for the slow one of four.

The devices are emulated (`devices.py`), the last five times slower, and every batch is cut into a
piece for each: nothing can be moved to the fast ones, and whoever is in lockstep waits. Arms: plain
`data=4`; servers in lockstep (`staleness=0`); servers whose workers run up to 4 batches ahead; and
servers whose workers run as they can (`staleness=any`); and `data=4` a second time, the control.
They take turns. All train the same batches with the same
rate. Worker 0 looks at the same held-out samples after each of its steps, which costs no device's
time, and the clock stops when their loss is at the target; the start of processes is not in it.

What to expect: with `any`, three devices go at full speed and one at a fifth, so at most 4.0 times
lockstep. A bound of s is a head start, no more: worker 0 is at its n-th batch when the slow one has
done n - s, so it takes (n - s) / n of lockstep's time if no step is lost to staleness. With s = 4
and the 50 batches that the target takes that is 1.09 times as fast, and less with every batch more:
a bound helps against passing delays, not against a worker that is always slow. Where a batch can be
cut finer, lockstep moves the work itself (`straggler`), and loses no step to staleness.

That workers really ran ahead is seen, not taken for granted: an arm out of lockstep of which no
batch was begun ahead of the others is not measured.

How it was tuned: not for any arm. The rate is the gentlest of three (1, 3, 6) with which one
process trains well; with the other two, lockstep is at the target in a third and a sixth of the
steps, and `any` was ahead by about as much.
"""

import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from bench import harness, ranks, serving
from bench.devices import WIDTH, OnDevice
from bench.harness import Row
from shoal.data.sources import tensors
from shoal.errors import GroupLost
from shoal.sync.server.strategy import ServerStrategy
from shoal.training.build import build_model
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World

NUM_RANKS, BATCH, NUM_HELD_OUT = 4, 64, 512
SAMPLE_S = 0.003  # a third of it forward
SLOWER, LIMIT, BOUND = 5, 4.0, 4
RATE, TARGET = 1.0, 0.25
MOST_STEPS = 64  # of lockstep, which needs about 50
PLANS = {
    "data": f"data={NUM_RANKS}",
    "lockstep": f"data={NUM_RANKS} sync=server staleness=0",
    "bounded": f"data={NUM_RANKS} sync=server staleness={BOUND}",
    "any": f"data={NUM_RANKS} sync=server staleness=any",
}
FLOORS = {"any": 1.5, "bounded": 0.95}


def make_run(rank: int) -> Run:
    sample_s = SAMPLE_S / 3 * (SLOWER if rank == NUM_RANKS - 1 else 1)
    inputs = _inputs()[NUM_HELD_OUT:]
    return Run(
        model=lambda: OnDevice(sample_s),
        loss=mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=RATE),
        data=tensors(inputs, inputs.roll(1, 1)),
        batch_size=BATCH,
        steps=1 << 20,
    )


def _inputs() -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(NUM_HELD_OUT + 32 * BATCH, WIDTH, generator=random)


def serve(plan: str) -> None:
    """Be the server."""
    run = make_run(0)
    resolved = resolve(run, plan, NUM_RANKS)
    model = build_model(run, resolved).model
    bound, optimizer = resolved.staleness_bound, run.make_optimizer(model)
    serving.serve(model, optimizer, num_pieces=resolved.num_pieces, bound=bound)


# ---- in the ranks


class Found(msgspec.Struct):
    """When worker 0 was at the target, after how many of its steps; and how stale all were."""

    seconds: float | None = None
    steps: int = 0
    loss: float = 0.0
    stale_mean: float = 0.0
    stale_most: int = 0


def train(world: World, plan: str, address: str, over: str) -> Found:
    """Train to the target. Every rank must call it."""
    run, flag = make_run(world.rank), Path(over)
    resolved = resolve(run, plan, world.num_ranks)
    in_lockstep = not address or resolved.staleness_bound == 0
    seat = serving.ServedSeat(world, address, lambda: not in_lockstep and flag.exists())
    trainer = Trainer(run, resolved, seat)
    held_out = _inputs()[:NUM_HELD_OUT]
    found = Found()
    with suppress(GroupLost), trainer:  # who waits for others when it is over is told so
        dist.barrier()
        started = perf_counter()
        for info in trainer:
            if world.rank == 0 and found.seconds is None:
                with torch.no_grad():
                    guess = trainer.model.layers(held_out)  # type: ignore[operator]
                    found.loss = mse_loss(guess, held_out.roll(1, 1)).item()
                found.steps = info.step
                if found.loss <= TARGET:
                    found.seconds = perf_counter() - started
                    flag.touch()
            if info.step == MOST_STEPS if in_lockstep else flag.exists():
                break
    if isinstance(trainer.strategy, ServerStrategy):
        _add_staleness(found, trainer.strategy)
    return found


def _add_staleness(found: Found, strategy: ServerStrategy) -> None:
    """Of all ranks together. Every rank must call it."""
    seen = strategy.staleness
    summed = torch.tensor([seen.count, seen.mean * seen.count], dtype=torch.float64)
    most = torch.tensor(seen.largest)
    dist.all_reduce(summed)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    found.stale_mean, found.stale_most = float(summed[1] / summed[0]), int(most)


# ---- in the bench


def run_arm(plan: str, found: list[Found]) -> float:
    """Seconds to the target; what else was found goes into the list."""
    found.append(_found_under(plan))
    return found[-1].seconds or math.nan


def _found_under(plan: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        over = f"{folder}/over"
        if "sync=server" not in plan:
            return ranks.start("async_straggler", NUM_RANKS, Found, plan, "", over)
        with serving.started("bench.async_straggler", plan) as address:
            return ranks.start("async_straggler", NUM_RANKS, Found, plan, address, over)


def measure(quick: bool) -> Iterator[Row]:
    plans = PLANS | {"again": PLANS["data"]}
    found: dict[str, list[Found]] = {arm: [] for arm in plans}
    arms = {arm: partial(run_arm, plan, found[arm]) for arm, plan in plans.items()}
    took = harness.interleave(arms, 1 if quick else 3, num_warm_up=0)
    for arm, all_ in found.items():
        for one in all_:
            if one.seconds is None:
                note = f"{arm}: no loss of {TARGET} after {one.steps} steps, but {one.loss:.3f}"
                yield Row(name="async-straggler", floor=FLOORS["any"], note=note)
                return
            if arm in FLOORS and not one.stale_most:
                note = f"{arm}: nobody was ahead of anybody, so nothing out of lockstep was seen"
                yield Row(name=f"async-straggler/{arm}", floor=FLOORS[arm], note=note)
                return
    for arm, floor in FLOORS.items():
        yield _row(arm, floor, found, took)


def _ceiling(arm: str, found: dict[str, list[Found]]) -> str:
    """What the arm could gain if no step were lost to staleness."""
    if arm == "any":
        return f"{LIMIT:.1f}x, nobody waits and nothing is stale"
    steps = harness.spread([one.steps for one in found["lockstep"]]).median
    return f"{steps / (steps - BOUND):.2f}x, a head start of {BOUND} in {steps:.0f} batches"


def _row(
    arm: str, floor: float, found: dict[str, list[Found]], took: dict[str, list[float]]
) -> Row:
    median = {name: harness.spread(seconds).median for name, seconds in took.items()}
    best = min(("data", "lockstep"), key=median.__getitem__)
    against = harness.spread(harness.ratios(took[best], took[arm]))
    served = harness.spread(harness.ratios(took["lockstep"], took["data"])).median
    own = found[arm]
    mean = harness.spread([one.stale_mean for one in own]).median
    most = max(one.stale_most for one in own)
    steps = "/".join(str(one.steps) for one in own)
    return Row(
        name=f"async-straggler/{arm}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=floor,
        peer=f"{PLANS[best]} {median[best]:.1f} s",
        ceiling=_ceiling(arm, found),
        control=harness.spread(harness.ratios(took["again"], took["data"])).median,
        note=f"{PLANS[arm]} {median[arm]:.1f} s to a loss of {TARGET}, {steps} steps of worker 0; "
        f"stale by {mean:.1f} batches, at most {most}; servers in lockstep take {served:.2f} "
        "of data's time; emulated devices",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    elif ranks.is_rank():
        ranks.serve(train)
    else:
        harness.main(measure)
