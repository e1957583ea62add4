"""A pipeline of four stages under each schedule, against PyTorch's schedule used by hand.

Four ranks on fewer cores could not show what a schedule is worth, so the devices are emulated: a
block sleeps where it would compute, 5 ms forward, 5 ms for the gradient of its input and 5 ms for
that of its weight. Eight blocks make four stages of 10 and 20 ms, or two of half that on each rank
for the schedules that want two. Eight microbatches, one optimizer step after them.

Both arms run the same blocks in the order of the same schedule, in the same processes, and take
turns: the peer by PyTorch's schedule class, Shoal by a loop of its own over that order. What Shoal
cuts and carries between stages by itself, the peer has as stages made by hand. The ceiling is the
schedule's own order of work with nothing between: no message, no bookkeeping.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import linear, mse_loss

from bench import harness, loops, ranks
from bench.harness import Row
from bench.loops import ShoalLoop
from shoal.data.sources import tensors
from shoal.parallel.pipeline.schedules import order_work
from shoal.training.run import Run, make_batches
from shoal.world import World

NUM_RANKS, NUM_BLOCKS, NUM_MICROBATCHES = 4, 8, 8
BATCH, WIDTH = 32, 64
BLOCK_S = 0.005  # of each of the three parts of a block's work
CHUNK = 2  # steps measured at a time
RATE = 1e-3
FLOOR = 1.02


class Schedule(NamedTuple):
    """PyTorch's class for a schedule, and how many stages a rank has under it."""

    kind: Any
    stages: int


SCHEDULES = {
    "gpipe": Schedule(pipelining.ScheduleGPipe, 1),
    "1f1b": Schedule(pipelining.Schedule1F1B, 1),
    "interleaved": Schedule(pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": Schedule(pipelining.ScheduleInterleavedZeroBubble, 1),
    "zbv": Schedule(pipelining.ScheduleZBVZeroBubble, 2),
}


class Paced(torch.autograd.Function):
    """The same tensor, after a while; and the same gradient, after another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()  # the zero-bubble schedules cannot have a view leave a stage

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Block(nn.Module):
    """A layer that takes its time on an emulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        # Two places, since a zero-bubble schedule runs the two halves of backward apart. The
        # input's is after the product: the first input needs no gradient, and its time counts too.
        weight = Paced.apply(self.weight, 0.0, BLOCK_S)  # type: ignore[no-untyped-call]
        done: Tensor = Paced.apply(linear(x, weight), BLOCK_S, BLOCK_S)  # type: ignore[no-untyped-call]
        return done


def make_run() -> Run:
    torch.manual_seed(1)
    inputs = torch.randn(4 * BATCH, WIDTH)
    return Run(
        model=lambda: nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))),
        loss=mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=RATE),
        data=tensors(inputs, inputs.roll(1, 1)),
        batch_size=BATCH,
        steps=1 << 30,
    )


def stages_of_rank(name: str, rank: int) -> list[int]:
    """Round and round, but zbv comes back: the first rank has the last stage too."""
    if name == "zbv":
        return [rank, 2 * NUM_RANKS - 1 - rank]
    return [rank + NUM_RANKS * lap for lap in range(SCHEDULES[name].stages)]


class BareSchedule:
    """Stages made by hand under PyTorch's schedule, and an optimizer over them."""

    def __init__(self, run: Run, name: str, rank: int):
        self.batches, self.step, self.loss = make_batches(run, 1), 0, 0.0
        blocks = list(run.make_model().children())
        kind, num_laps = SCHEDULES[name]
        num_stages = NUM_RANKS * num_laps
        size, device = NUM_BLOCKS // num_stages, torch.device("cpu")
        own = stages_of_rank(name, rank)
        stages = [
            PipelineStage(nn.Sequential(*blocks[s * size : (s + 1) * size]), s, num_stages, device)
            for s in own
        ]
        self.has_first, self.has_last = 0 in own, num_stages - 1 in own
        of_kind = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
        self.schedule = kind(of_kind, NUM_MICROBATCHES, loss_fn=mse_loss)
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)

    def chunk(self) -> float:
        """Seconds a step, over a chunk."""
        pieces = [self.batches.at(self.step + k).piece(0) for k in range(CHUNK)]
        losses: list[Tensor] = []
        dist.barrier()
        started = perf_counter()
        for piece in pieces:
            losses.clear()
            self.optimizer.zero_grad()
            self.schedule.step(
                *([piece.inputs] if self.has_first else []),
                target=piece.target if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
            )
            self.optimizer.step()
        dist.barrier()
        seconds = perf_counter() - started
        self.step += CHUNK
        self.loss = sum(loss.item() for loss in losses) / NUM_MICROBATCHES
        return seconds / CHUNK

    def mean_loss(self) -> float:
        """One rank knows it. Every rank must call it."""
        known = torch.tensor([self.loss])
        dist.all_reduce(known)
        return known.item()


Work = tuple[str, int, int]  # F, B, I (the input's part of B) or W; the stage; the microbatch


def order_of(name: str) -> dict[int, list[Work]]:
    """What each rank does under either arm, one thing after another."""
    stages = [stages_of_rank(name, rank) for rank in range(NUM_RANKS)]
    order = order_work(name, stages, NUM_MICROBATCHES)
    return {
        rank: [(action.kind.value, action.stage, action.microbatch) for action in actions]
        for rank, actions in enumerate(order)
    }


def ideal_s(order: Mapping[int, Sequence[Work]], num_stages: int) -> float:
    """How long the ranks' lists of work take if nothing but the work takes time.

    An item waits for the one before it on its rank, and for what it needs: a forward for the stage
    before, a backward for its own forward and the stage after, a weight's for its input's gradient.
    """
    part = BLOCK_S * NUM_BLOCKS / num_stages
    ends: dict[Work, float] = {}
    clock, at = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)
    while any(at[rank] < len(order[rank]) for rank in order):
        before = dict(at)
        for rank, items in order.items():
            while at[rank] < len(items):
                kind, stage, batch = items[at[rank]]
                needs = _needs(kind, stage, batch, num_stages)
                if any(need not in ends for need in needs):
                    break
                begin = max([clock[rank], *(ends[need] for need in needs)])
                clock[rank] = begin + part * _parts(kind, stage)
                ends["B" if kind == "I" else kind, stage, batch] = clock[rank]
                at[rank] += 1
        if at == before:
            raise RuntimeError(f"The order {order} waits for itself.")
    return max(clock.values())


def _needs(kind: str, stage: int, batch: int, num_stages: int) -> list[Work]:
    if kind == "F":
        return [("F", stage - 1, batch)] if stage else []
    if kind in "BI":
        after = [("B", stage + 1, batch)] if stage < num_stages - 1 else []
        return [("F", stage, batch), *after]
    return [("B", stage, batch)] if kind == "W" else []


def _parts(kind: str, stage: int) -> int:
    """Of a stage's work; PyTorch leaves all of the first stage's backward to the weights' turn."""
    if kind == "I":
        return 0 if stage == 0 else 1
    if kind == "W":
        return 2 if stage == 0 else 1
    return {"F": 1, "B": 2}.get(kind, 0)


class Times(msgspec.Struct):
    """What the ranks found under one schedule: seconds a step, by arm and round."""

    seconds: dict[str, list[float]]
    ideal_s: float


def plan(name: str) -> str:
    return f"data=1 pipeline={NUM_RANKS} schedule={name} microbatches={NUM_MICROBATCHES}"


def measure_schedule(world: World, name: str, length: str) -> Times:
    """Every rank must call it."""
    run = make_run()
    with ExitStack() as stack:
        arms: dict[str, BareSchedule | ShoalLoop] = {"bare": BareSchedule(run, name, world.rank)}
        if not loops.refusal(plan(name)):
            arms["shoal"] = ShoalLoop(run, plan(name), world, stack, CHUNK)
        arms["again"] = BareSchedule(run, name, world.rank)
        stack.enter_context(harness.quiet())
        chunks = {arm: loop.chunk for arm, loop in arms.items()}
        seconds = harness.interleave(chunks, 4 if length == "quick" else 15, num_warm_up=1)
        loops.check_alike({arm: loop.mean_loss() for arm, loop in arms.items()})
    num_stages = NUM_RANKS * SCHEDULES[name].stages
    return Times(seconds, ideal_s(order_of(name), num_stages))


def measure(quick: bool) -> Iterator[Row]:
    for name in SCHEDULES:
        words = name, "quick" if quick else "full"
        yield _row(name, ranks.start("pipeline", NUM_RANKS, Times, *words))


def _row(name: str, times: Times) -> Row:
    bare = times.seconds["bare"]
    control = harness.spread(harness.ratios(times.seconds["again"], bare)).median
    bare_s = harness.spread(bare).median
    peer = f"bare schedule {bare_s * 1e3:.1f} ms"
    ceiling = f"the schedule's own order {times.ideal_s * 1e3:.1f} ms"
    if (own := times.seconds.get("shoal")) is None:
        note = f"{loops.refusal(plan(name))} {peer}, {bare_s / times.ideal_s:.3f} of {ceiling}"
        return Row(name=f"pipeline/{name}", floor=FLOOR, at_most=True, note=note)
    against = harness.spread(harness.ratios(own, bare))
    own_s = harness.spread(own).median
    return Row(
        name=f"pipeline/{name}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        at_most=True,
        peer=peer,
        ceiling=ceiling,
        control=control,
        note=f"of the ceiling's time: Shoal {own_s / times.ideal_s:.3f}, "
        f"bare {bare_s / times.ideal_s:.3f}; emulated devices",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_schedule)
    else:
        harness.main(measure)
