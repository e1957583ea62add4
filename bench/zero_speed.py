"""Steps per second of each level of ZeRO on two ranks, against what one would write by hand.

As `dp`, with its two models: all arms live in the same two processes, on one Gloo group, and take
turns a few steps at a time. The peers are in `bench/peers.py`; DDP, which level 1 stands on, has
the better of two bucket sizes, and FSDP2 gathers a block of the GPT or a layer of the MLP at a
time. The ceiling is twins that never talk, a plain loop on each rank's share. All but those must
end with the same loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import torch
from torch import nn

from bench import dp, harness, loops, peers, ranks
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.training.run import Run
from shoal.world import World

NUM_RANKS = dp.NUM_RANKS
CHUNK = 4  # steps measured at a time
LEVELS = (1, 2, 3)
FLOOR = 1.0


class Times(msgspec.Struct):
    """What the ranks of one model found: seconds a step, by arm and round."""

    seconds: dict[str, list[float]]
    bucket_mb: int


def plan(level: int) -> str:
    """Where ranks hold shards alone, as over several hosts."""
    return f"data={NUM_RANKS} zero={level}{' memory=apart' if level < 3 else ''}"


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """What FSDP2 gathers at a time: the GPT's blocks, or the MLP's layers."""
    kind = dp.Block if isinstance(model, dp.GPT) else nn.Linear
    return [module for module in model.modules() if isinstance(module, kind)]


def by_hand(run: Run, world: World, level: int, bucket_mb: int) -> PlainLoop:
    model, optimizer = peers.peer(level, run.make_model(), blocks, dp.RATE, bucket_mb)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), CHUNK)


def twins(run: Run, world: World) -> PlainLoop:
    model = run.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=dp.RATE, fused=True)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), CHUNK)


def measure_model(world: World, name: str, length: str) -> Times:
    """Every rank must call it."""
    run, quick = dp.MODELS[name](), length == "quick"
    with ExitStack() as stack:
        sizes = {str(mb): by_hand(run, world, 1, mb) for mb in dp.BUCKETS_MB}
        stack.enter_context(harness.quiet())
        best = int(loops.best_of(sizes, 3 if quick else 8))
        del sizes
        alike: dict[str, PlainLoop | ShoalLoop] = {}
        for level in LEVELS:
            alike[f"peer/{level}"] = by_hand(run, world, level, best)
            alike[f"again/{level}"] = by_hand(run, world, level, best)
            if not loops.refusal(plan(level)):
                alike[f"shoal/{level}"] = ShoalLoop(run, plan(level), world, stack, CHUNK)
        chunks = {arm: loop.chunk for arm, loop in alike.items()}
        chunks["twins"] = twins(run, world).chunk
        seconds = harness.interleave(chunks, 6 if quick else 24, num_warm_up=2)
        loops.check_alike({arm: loop.mean_loss() for arm, loop in alike.items()})
    return Times(seconds, best)


def measure(quick: bool) -> Iterator[Row]:
    for name in dp.MODELS:
        words = name, "quick" if quick else "full"
        times = ranks.start("zero_speed", NUM_RANKS, Times, *words)
        for level in LEVELS:
            yield _row(f"zero-speed/{name}/{level}", level, times)


def _row(name: str, level: int, times: Times) -> Row:
    seconds = times.seconds
    peer = seconds[f"peer/{level}"]
    control = harness.ratios(seconds[f"again/{level}"], peer)
    named = f"{peers.NAMES[level]} {harness.spread(peer).median * 1e3:.1f} ms"
    named += f" with {times.bucket_mb} MB buckets" if level == 1 else ""
    of_peer = harness.spread(harness.ratios(seconds["twins"], peer)).median
    if (own := seconds.get(f"shoal/{level}")) is None:
        note = f"{loops.refusal(plan(level))} {named}, {of_peer:.2f} of the twins"
        return Row(name=name, floor=FLOOR, note=note)
    # Throughput against throughput: the peer's seconds over Shoal's.
    against = harness.spread(harness.ratios(peer, own))
    of_own = harness.spread(harness.ratios(seconds["twins"], own)).median
    return Row(
        name=name,
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        noise=harness.noise_of(control),
        peer=named,
        ceiling=f"twins {harness.spread(seconds['twins']).median * 1e3:.1f} ms",
        control=harness.spread(control).median,
        note=f"of the twins: Shoal {of_own:.2f}, by hand {of_peer:.2f}",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_model)
    else:
        harness.main(measure)
