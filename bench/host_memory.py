"""Bytes for each parameter on each of four ranks of one host that hold one copy of the state.

Under `data=4` with fp32 and Adam the parameters (4 bytes) and their moments (8) stand once in
memory that all ranks share, beside a gradient (4) of each rank: (4 + 4N + 8)/N bytes a rank. The
log of the chunk that a rank updates, and its sum, are granted on top. The peer is
DistributedDataParallel, which holds 16 and its buckets.

Bytes are taken as in `zero_memory.py`, whose model this is, each arm in fresh processes. Steps per
second come from the same processes, and must not be below DDP's. Four ranks on fewer cores share
them, both arms alike, and are emulated devices. The ceiling of speed is the plain loop without any
exchange.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import torch
import torch.distributed as dist

from bench import harness, ranks, zero_memory
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from bench.zero_memory import NUM_RANKS, RATE, SMALL, STEPS, WIDTH
from shoal.sync.host_state import CHUNK
from shoal.world import World

FORMULA = (4 + 4 * NUM_RANKS + 8) / NUM_RANKS
LOG_BYTES = 4 * (3 + 1) * CHUNK  # parameters, two moments; and the sum
FLOOR, SPEED_FLOOR = 1.05, 1.0
CHUNKS = 6  # of steps, timed


class Found(msgspec.Struct):
    """Of the rank that held most; and seconds a step."""

    num_bytes: float
    seconds: float


def make_loop(arm: str, width: int, world: World, stack: ExitStack) -> PlainLoop | ShoalLoop:
    if arm != "twins":
        return zero_memory.make_loop(arm, 0, width, world, stack)
    run = zero_memory.make_run(width)
    model = run.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), STEPS)


def measure_arm(world: World, arm: str) -> Found:
    """Every rank must call it."""
    with ExitStack() as stack:
        make_loop(arm, SMALL, world, stack).chunk()
    with harness.quiet():  # after a collection
        before = zero_memory.held_bytes()
        with ExitStack() as stack:
            loop = make_loop(arm, WIDTH, world, stack)
            loop.chunk()
            most = torch.tensor([float(zero_memory.peak_bytes(loop.chunk) - before)])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            seconds = harness.spread([loop.chunk() for _ in range(CHUNKS)]).median
    return Found(most.item(), seconds)


def measure(quick: bool) -> Iterator[Row]:
    beside, num = zero_memory.kept_bytes(), zero_memory.num_parameters()
    bytes_each: dict[str, list[float]] = {}

    def arm(name: str) -> Callable[[], float]:
        def seconds() -> float:
            # Else freed memory stays with the process, as much as chance will have it.
            keep = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            kind = name.removesuffix("-again")
            found = ranks.start("host_memory", NUM_RANKS, Found, kind, **keep)
            bytes_each.setdefault(name, []).append((found.num_bytes - beside) / num)
            return found.seconds

        return seconds

    arms = {name: arm(name) for name in ("peer", "shoal", "twins", "peer-again")}
    seconds = harness.interleave(arms, 1 if quick else 5, num_warm_up=0)
    own, theirs = (harness.spread(bytes_each[name]).median for name in ("shoal", "peer"))
    granted = LOG_BYTES / num
    seen = harness.spread([(value - granted) / FORMULA for value in bytes_each["shoal"]])
    alike = harness.ratios(bytes_each["peer-again"], bytes_each["peer"])
    yield Row(
        name="host-memory",
        value=seen.median,
        low=seen.low,
        high=seen.high,
        num_pairs=seen.num_pairs,
        floor=FLOOR,
        at_most=True,
        peer=f"DDP {theirs:.2f} bytes",
        ceiling=f"the arithmetic {FORMULA:.2f} bytes",
        control=harness.spread(alike).median,
        note=f"Shoal {own:.2f} bytes a parameter and rank, {granted:.2f} of them granted for logs",
    )
    against = harness.spread(harness.ratios(seconds["peer"], seconds["shoal"]))
    control = harness.ratios(seconds["peer-again"], seconds["peer"])
    ddp_ms, twins_ms = (harness.spread(seconds[arm]).median * 1e3 for arm in ("peer", "twins"))
    of_twins = harness.spread(harness.ratios(seconds["twins"], seconds["shoal"])).median
    yield Row(
        name="host-memory/speed",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=SPEED_FLOOR,
        noise=harness.noise_of(control),
        peer=f"DDP {ddp_ms:.1f} ms",
        ceiling=f"twins {twins_ms:.1f} ms",
        control=harness.spread(control).median,
        note=f"of the twins: Shoal {of_twins:.2f}",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_arm)
    else:
        harness.main(measure)
