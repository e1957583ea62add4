"""`guard`: what `codec=auto` and `bucket=auto` cost where they can gain nothing.

Two ranks of one host, which exchange in shared memory, and the models of `dp`. Three trainers live
in the same two processes and take turns a few steps at a time: without a codec; with both left to
be measured; and without a codec again, which says how far the machine is from itself. The
rehearsals before the first step are not in the ratio; the row says how long they took. All must
end with the same loss, or something was sent in fewer bits.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter

import msgspec

from bench import dp, harness, loops, ranks
from bench.harness import Row
from bench.loops import ShoalLoop
from shoal.world import World

FLOOR = 0.99
PLANS = {"dense": "", "auto": " codec=auto bucket=auto", "again": ""}


class Times(msgspec.Struct):
    """Seconds a step, by arm and round; what was chosen; seconds until that was known."""

    seconds: dict[str, list[float]]
    plan: str
    began_s: dict[str, float]


def measure_model(world: World, name: str, length: str) -> Times:
    """Every rank must call it."""
    run, quick, began_s = dp.MODELS[name](), length == "quick", dict[str, float]()
    with ExitStack() as stack:
        stack.enter_context(harness.quiet())
        arms = dict[str, ShoalLoop]()
        for arm, keys in PLANS.items():
            began = perf_counter()
            plan = f"data={dp.NUM_RANKS}{keys}"
            arms[arm] = ShoalLoop(run, plan, world, stack, dp.CHUNK)
            began_s[arm] = perf_counter() - began
        chunks = {arm: loop.chunk for arm, loop in arms.items()}
        seconds = harness.interleave(chunks, 10 if quick else 40, num_warm_up=2)
        loops.check_alike({arm: loop.mean_loss() for arm, loop in arms.items()})
    return Times(seconds, str(arms["auto"].trainer.plan), began_s)


def measure(quick: bool) -> Iterator[Row]:
    for name in dp.MODELS:
        times = ranks.start("guard", dp.NUM_RANKS, Times, name, "quick" if quick else "full")
        yield row(name, times)


def row(name: str, times: Times) -> Row:
    against = harness.spread(harness.ratios(times.seconds["dense"], times.seconds["auto"]))
    control = harness.ratios(times.seconds["again"], times.seconds["dense"])
    dense_ms = harness.spread(times.seconds["dense"]).median * 1e3
    measuring_s = times.began_s["auto"] - min(times.began_s["dense"], times.began_s["again"])
    return Row(
        name=f"guard/{name}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        noise=harness.noise_of(control),
        peer=f"dense {dense_ms:.1f} ms",
        ceiling="dense",
        control=harness.spread(control).median,
        note=f"{times.plan}, measured in {measuring_s:.1f} s",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_model)
    else:
        harness.main(measure)
