"""All-reduce of ranks of one host through shared memory against Gloo, by message size.

Both groups live in the same processes and take turns. Two ranks have a core each; four share two
cores, as emulated devices, and must not be slower than Gloo at any size. The ceiling is a copy of
the message within one process: what no way to move it can beat.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from bench import harness, ranks
from bench.harness import Row
from shoal.comm.shared_group import new_shared_group
from shoal.world import World

SIZES = {"1KB": 1 << 10, "64KB": 64 << 10, "1MB": 1 << 20, "32MB": 32 << 20}
FLOORS = {
    2: {"1KB": 10.0, "64KB": 8.0, "1MB": 4.0, "32MB": 2.0},
    4: dict.fromkeys(SIZES, 1.0),
}


class Times(msgspec.Struct):
    """Seconds of an all-reduce, or a copy, by arm and round."""

    seconds: dict[str, list[float]]


def measure_size(world: World, size: str, length: str) -> Times:
    """Every rank must call it."""
    num_bytes, gloo = SIZES[size], dist.group.WORLD
    shared = new_shared_group(range(world.num_ranks), timedelta(seconds=60))
    if shared is None:
        raise SystemExit("These ranks cannot share memory.")
    message, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    repeats = max(4, min(200, (16 << 20) // num_bytes))

    def timed(operation: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            dist.barrier(shared)  # ranks begin together
            began = time.perf_counter()
            for _ in range(repeats):
                operation()
            return (time.perf_counter() - began) / repeats

        return run

    arms = {
        "gloo": timed(lambda: dist.all_reduce(message, group=gloo)),
        "shared": timed(lambda: dist.all_reduce(message, group=shared)),
        "copy": timed(lambda: other.copy_(message)),
        "again": timed(lambda: dist.all_reduce(message, group=gloo)),
    }
    with harness.quiet():
        return Times(harness.interleave(arms, 7 if length == "quick" else 25, num_warm_up=2))


def measure(quick: bool) -> Iterator[Row]:
    for num_ranks, floors in FLOORS.items():
        for size, floor in floors.items():
            words = size, "quick" if quick else "full"
            yield _row(num_ranks, size, floor, ranks.start("collectives", num_ranks, Times, *words))


def _row(num_ranks: int, size: str, floor: float, times: Times) -> Row:
    seconds = times.seconds
    against = harness.spread(harness.ratios(seconds["gloo"], seconds["shared"]))
    control = harness.ratios(seconds["again"], seconds["gloo"])
    gloo_us, own_us, copy_us = (
        harness.spread(seconds[arm]).median * 1e6 for arm in ("gloo", "shared", "copy")
    )
    emulated = ", emulated devices" if num_ranks > 2 else ""
    return Row(
        name=f"collectives/{num_ranks}/{size}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=floor,
        noise=harness.noise_of(control) if floor == 1.0 else 0.0,
        peer=f"Gloo {gloo_us:,.0f} us",
        ceiling=f"a copy {copy_us:,.0f} us",
        control=harness.spread(control).median,
        note=f"shared memory {own_us:,.0f} us{emulated}",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_size)
    else:
        harness.main(measure)
