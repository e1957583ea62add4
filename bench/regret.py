"""The time of a step of the plan that is chosen, over the best of all that were measured.

The search of `shoal plan` ranks the plans for one and two ranks, from a profile that is made at the
start of the bench and this machine as `shoal doctor --save` last measured it. The first of each
kind, up to `MOST_PLANS`, then really train, in turns, with DDP and FSDP2 as one gets them by
default. What runs on one rank is a plain loop there, while the other rank waits. Servers are left
out: they need processes of their own.

Three models: the GPT and the MLP of `dp`, and an MLP so small that a second rank does not pay.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from bench import dp, harness, peers, ranks, zero_speed
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.cli.plan import first_of, kind_of
from shoal.cost.planning import rank_plans
from shoal.cost.profiler import profile_run
from shoal.cost.this_machine import this_cluster
from shoal.data.sources import tensors
from shoal.plans.plan import Plan
from shoal.training.run import Run
from shoal.world import World

NUM_RANKS = dp.NUM_RANKS
CHUNK = 4  # steps measured at a time
MOST_PLANS = 12
FLOOR = 1.05


class Measured(msgspec.Struct):
    """Seconds a step, by plan and round; the plan chosen, and what was predicted of each."""

    seconds: dict[str, list[float]]
    chosen: str
    predicted: dict[str, float]


def tiny() -> Run:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))

    torch.manual_seed(1)
    return Run(
        model=model,
        loss=mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=dp.RATE),
        data=tensors(torch.randn(512, 64), torch.randn(512, 16)),
        batch_size=32,
        steps=1 << 30,
    )


MODELS = {**dp.MODELS, "tiny": tiny}


def candidates(run: Run) -> dict[str, float]:
    """The plans to measure, the chosen one first, with what is predicted of them."""
    found = rank_plans(run, profile_run(run, fresh=True), this_cluster(), num_steps=1)
    same = [one for one in found.plans if not one.changes_result]
    kinds = [one for one in first_of(same, kind_of) if Plan.parse(one.plan).sync != "server"]
    return {one.plan: one.step_s for one in kinds[:MOST_PLANS]}


class OnOneRank(PlainLoop):
    """A loop on rank 0 alone; others only meet it at the barriers."""

    def chunk(self) -> float:
        if dist.get_rank() == 0:
            return super().chunk()
        dist.barrier()
        dist.barrier()
        return 0.0


def arm(run: Run, plan: str, world: World, stack: ExitStack) -> PlainLoop | ShoalLoop:
    if Plan.parse(plan).num_ranks > 1:
        return ShoalLoop(run, plan, world, stack, CHUNK)
    model = run.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=dp.RATE, fused=True)
    return OnOneRank(run, model, optimizer, Share(0, 1), CHUNK)


def by_default(run: Run, world: World, level: int) -> PlainLoop:
    """DDP or FSDP2 as their tutorials write them."""
    model, optimizer = peers.peer(level, run.make_model(), zero_speed.blocks, dp.RATE)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), CHUNK)


def measure_model(world: World, name: str, length: str, told: str) -> Measured:
    """Every rank must call it; `told` are the plans with their predictions."""
    run, predicted = MODELS[name](), msgspec.json.decode(told, type=dict[str, float])
    plans = list(predicted)
    with ExitStack() as stack:
        arms = {plan: arm(run, plan, world, stack) for plan in plans}
        arms |= {"again": arm(run, plans[0], world, stack)}
        arms |= {"DDP": by_default(run, world, 0), "FSDP2": by_default(run, world, 3)}
        stack.enter_context(harness.quiet())
        chunks = {which: loop.chunk for which, loop in arms.items()}
        seconds = harness.interleave(chunks, 6 if length == "quick" else 16, num_warm_up=2)
    return Measured(seconds, plans[0], predicted)


def measure(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    for name, make in MODELS.items():
        told = msgspec.json.encode(candidates(make())).decode()
        words = name, "quick" if quick else "full", told
        found = ranks.start("regret", NUM_RANKS, Measured, *words)
        yield from _rows(name, found)


def _rows(name: str, found: Measured) -> Iterator[Row]:
    seconds, chosen = found.seconds, found.seconds[found.chosen]
    medians = {plan: harness.spread(seconds[plan]).median for plan in found.predicted}
    best = min(medians, key=lambda plan: medians[plan])
    control = harness.ratios(seconds["again"], chosen)
    noise, repeats = harness.noise_of(control), harness.spread(control).median
    ordered = sorted(medians, key=lambda plan: medians[plan])
    worst = ordered[-1]
    against = harness.spread(harness.ratios(chosen, seconds[best]))
    yield Row(
        name=f"regret/{name}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        at_most=True,
        noise=noise,
        peer=f"best of {len(medians)} measured, {best}: {medians[best] * 1e3:.2f} ms",
        ceiling="1, by definition",
        control=repeats,
        note=f"chosen {found.chosen}: {medians[found.chosen] * 1e3:.2f} ms, predicted "
        f"{found.predicted[found.chosen] * 1e3:.2f}; the worst, {worst}: "
        f"{medians[worst] * 1e3:.2f} ms",
    )
    for peer in ("DDP", "FSDP2"):
        ratio = harness.spread(harness.ratios(seconds[peer], chosen))
        yield Row(
            name=f"regret/{name}/{peer.lower()}",
            value=ratio.median,
            low=ratio.low,
            high=ratio.high,
            num_pairs=ratio.num_pairs,
            floor=1.0,
            noise=noise,
            peer=f"{peer} by default {harness.spread(seconds[peer]).median * 1e3:.2f} ms",
            ceiling=f"{best} {medians[best] * 1e3:.2f} ms",
            control=repeats,
            note=f"chosen {found.chosen}",
        )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_model)
    else:
        harness.main(measure)
