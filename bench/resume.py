"""The first batch a million samples into the data, against replaying and against the first of all.

Shoal's batches are a pure function of the step, so batches that were just made, as after a restart,
are asked for step 15,625 and have it; the row `position` compares that with asking for step 0. The
step is all that a checkpoint keeps of the place in the data. Samples are tensors in memory, and the
process is warm: starting one, opening files and loading a checkpoint cost the same at any position
and are not in these figures. The peer is torch's DataLoader over the
same samples with a seeded shuffle, which gets there by drawing every batch before it, without
loading them (its sampler alone is run): the cheapest replay there is. Both must come to the same
place in their own order again. The ceiling is gathering 64 rows whose numbers are known.
"""

from collections.abc import Iterator
from itertools import islice
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from bench import harness
from bench.harness import Row
from shoal.data.batches import Batches
from shoal.data.sources import TensorSource, tensors

NUM_SAMPLES, CONSUMED, BATCH, WIDTH = 2_000_000, 1_000_000, 64, 16
STEP = CONSUMED // BATCH


def first_batch(source: TensorSource, step: int) -> float:
    """Seconds until batches that are made anew have given the one of this step.

    The median of several, since it is short: the first one after another arm finds that arm's
    memory in the caches.
    """

    def once() -> float:
        started = perf_counter()
        Batches(source, batch_size=BATCH, seed=1).at(step).piece(0)
        return perf_counter() - started

    return median(once() for _ in range(9))


def replayed(source: TensorSource, step: int) -> float:
    started = perf_counter()
    generator = torch.Generator().manual_seed(1)
    drawn = BatchSampler(RandomSampler(source, generator=generator), BATCH, drop_last=True)
    source.take(np.array(next(islice(drawn, step, None))))
    return perf_counter() - started


def gathered(source: TensorSource, ids: np.ndarray) -> float:  # type: ignore[type-arg]
    started = perf_counter()
    source.take(ids)
    return perf_counter() - started


def check_same_place(source: TensorSource) -> None:
    """A batch that was reached by going there is the one that is reached at once."""
    walked = Batches(source, batch_size=BATCH, seed=1)
    for step in range(STEP - 50, STEP):
        walked.at(step).piece(0)
    at_once = Batches(source, batch_size=BATCH, seed=1).at(STEP).piece(0)
    if not torch.equal(walked.at(STEP).piece(0).target, at_once.target):
        raise RuntimeError("The batch after a restart is another one.")


def measure(quick: bool) -> Iterator[Row]:
    source = tensors(torch.zeros(NUM_SAMPLES, WIDTH), torch.arange(NUM_SAMPLES))
    check_same_place(source)
    ids = np.random.default_rng(1).integers(0, NUM_SAMPLES, BATCH)
    arms = {
        "there": lambda: first_batch(source, STEP),
        "start": lambda: first_batch(source, 0),
        "again": lambda: first_batch(source, 0),
        "replay": lambda: replayed(source, STEP),
        "gather": lambda: gathered(source, ids),
    }
    with harness.quiet():
        seconds = harness.interleave(arms, 5 if quick else 15)
    medians = {name: harness.spread(found).median for name, found in seconds.items()}
    control = harness.ratios(seconds["again"], seconds["start"])
    ceiling = f"gathering known rows {medians['gather'] * 1e6:.0f} us"
    place = harness.spread(harness.ratios(seconds["there"], seconds["start"]))
    yield Row(
        name="resume/position",
        value=place.median,
        low=place.low,
        high=place.high,
        num_pairs=place.num_pairs,
        floor=1.1,
        at_most=True,
        noise=harness.noise_of(control),
        peer=f"step 0 {medians['start'] * 1e3:.2f} ms",
        ceiling=ceiling,
        note=f"after {CONSUMED:,} samples {medians['there'] * 1e3:.2f} ms",
    )
    against = harness.spread(harness.ratios(seconds["replay"], seconds["there"]))
    yield Row(
        name="resume/replay",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=10.0,
        peer=f"DataLoader's sampler {medians['replay'] * 1e3:.0f} ms",
        ceiling=ceiling,
        control=harness.spread(control).median,
    )


if __name__ == "__main__":
    harness.main(measure)
