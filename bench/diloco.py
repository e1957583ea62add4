"""`diloco`: bytes moved until a validation loss, against an all-reduce on every step.

A character GPT on Shakespeare, four replicas, the same global batches and the same target for both
arms. The peer is `data=4`; Shoal takes many local steps, and packs what they came to into 4 bits.
Bytes are what the ranks' groups count, all ranks together; evaluations are not in them. Both arms
evaluate the same held-out text until they are at the target: the peer every 20 steps, Shoal
whenever replicas agree. With bytes alone one could cheat by training longer, so the samples that
each arm used stand beside them. Nothing here is a time.

How it was tuned, in trials on a seed that is not measured: both arms had the same two learning
rates to choose from, 4e-3 and 8e-3, and took the first (the peer came to the target after 520 steps
with it, after 700 with the other). Shoal's number of local steps was chosen among 64, 256 and 320,
its outer rate and momentum among five pairs, for which the peer has no counterpart. The size of the
model matters: in a trial with twice the width local steps took about five times the peer's samples.
"""

from collections.abc import Iterator

import msgspec
import torch
from torch.nn import functional as F

import shoal
from bench import harness, ranks
from bench.harness import Row
from shoal.comm.mesh import LauncherSeat
from shoal.numerics import schedules
from shoal.training.recipe import find_recipe
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World

NUM_RANKS, BATCH, LENGTH = 4, 32, 64
NUM_HELD_OUT = 256  # windows
TARGET = 2.2
MOST_STEPS = 8192
FLOOR = 100.0
SEEDS = (1, 2, 3)
EVERY = 20  # steps between two looks at the peer


class Arm(msgspec.Struct, frozen=True):
    """A plan, its learning rate, and after how many steps it is looked at."""

    plan: str
    rate: float
    every: int


PEER = Arm(f"data={NUM_RANKS}", 4e-3, EVERY)
SHOAL = Arm(f"data={NUM_RANKS} local_steps=256 outer=nesterov:1.0:0.3 codec=int4", 4e-3, 256)


class Found(msgspec.Struct):
    """Of one run: whether and when it came to the target."""

    steps: int
    num_bytes: int
    losses: list[float]  # on held-out text

    @property
    def is_there(self) -> bool:
        return self.losses[-1] <= TARGET


def make_run(rate: float, seed: int) -> Run:
    text = shoal.data.catalog.text("shakespeare")
    gpt = find_recipe(f"{harness.ROOT / 'recipes' / 'charlm.py'}:GPT")
    return Run(
        model=lambda: gpt(len(text.alphabet), LENGTH, layers=2, width=32, heads=4, dropout=0.0),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=rate, betas=(0.9, 0.98)),
        schedule=schedules.constant(warmup=50),
        clip=1.0,
        data=shoal.data.windows(text.tokens[: len(text.tokens) * 95 // 100], LENGTH),
        batch_size=BATCH,
        steps=MOST_STEPS,
        seed=seed,
    )


def train(world: World, plan: str, rate: str, every: str, seed: str) -> Found:
    """Train to the target. Every rank must call it."""
    run = make_run(float(rate), int(seed))
    text = shoal.data.catalog.text("shakespeare").tokens[-(NUM_HELD_OUT * LENGTH + 1) :]
    held_out = shoal.data.windows(text, LENGTH)
    found = Found(0, 0, [])
    with Trainer(run, resolve(run, plan, world.num_ranks), LauncherSeat(world)) as trainer:
        for info in trainer:
            found.steps, found.num_bytes = info.step, found.num_bytes + info.bytes_sent
            if info.step % int(every) == 0:
                found.losses.append(trainer.evaluate(held_out)["loss"])
                if found.is_there:
                    break
        rows = trainer.mesh.world.all_gather_numbers([found.num_bytes])
    found.num_bytes = int(sum(row[0] for row in rows))
    return found


def run_arm(arm: Arm, seed: int) -> Found:
    words = (arm.plan, str(arm.rate), str(arm.every), str(seed))
    return ranks.start("diloco", NUM_RANKS, Found, *words)


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    peer, own = [], []
    for seed in SEEDS[: 1 if quick else 3]:
        peer.append(run_arm(PEER, seed))
        own.append(run_arm(SHOAL, seed))
    for found in (*peer, *own):
        if not found.is_there:
            note = f"no loss of {TARGET} after {found.steps} steps, but {found.losses[-1]:.3f}"
            yield Row(name="diloco", floor=FLOOR, note=note)
            return
    fewer = harness.spread([a.num_bytes / b.num_bytes for a, b in zip(peer, own, strict=True)])
    more = harness.spread([b.steps / a.steps for a, b in zip(peer, own, strict=True)])
    yield Row(
        name="diloco",
        value=fewer.median,
        low=fewer.low,
        high=fewer.high,
        num_pairs=fewer.num_pairs,
        floor=FLOOR,
        peer=f"{PEER.plan} {_of(peer)}",
        ceiling="nothing sent",
        note=f"Shoal {_of(own)}: {more.median:.2f}x the samples, to a loss of {TARGET}",
    )


def _of(found: list[Found]) -> str:
    moved = harness.spread([one.num_bytes / 1e6 for one in found]).median
    samples = harness.spread([one.steps * BATCH for one in found]).median
    return f"{moved:.2f} MB in {samples:.0f} samples"


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(train)
    else:
        harness.main(measure)
