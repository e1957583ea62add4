"""`shared`: four runs over one set of images on one host, against four that decode alone.

A run is a process that goes through the images three times, in batches of 32, and makes each a
tensor of 256 x 256 with Pillow; nothing is trained, so nothing else is in the figure. Alone, each
does so for itself, in every pass. Shared, each reads through `shoal.data.cached` into an area that
is new and empty in every round; making and filling it are in the figure. `same`: all runs have one
seed and want the same images at the same time, as the trials of a tuning do; `other`: each has a
seed of its own. The ceiling is the same reading when all is there already.

Two sets, because the gain depends on what an image costs to make: `jpeg` is of 256 x 256 already,
under a millisecond each; `photo` is of 640 x 480 and has to be scaled. The figure is the time until
the last run is done, alone over shared. `first` is the first pass by itself, in which nothing is
met again and all that is won is won by sharing: it can reach 4, less what keeping and finding cost;
its ceiling is measured (`bare`): each run decodes a quarter, writes the pixels into new memory that
all share, and after a barrier copies every image into the rows of its batches. Nothing is looked
up, locked, hashed or waited for there, so what it takes is the decoding and the memory's own time.
`passes` is all three, where one run's own cache would come near 3. With fewer cores than runs both
sides share them alike. The floor is 3 for all; the first pass over small images misses it, and so
do bare copies there, on two cores.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from bench import harness, ranks
from bench.harness import Row
from shoal.data.batches import Batches
from shoal.data.cache.cached import Cached, cached
from shoal.data.sources import Source
from shoal.world import World

NUM_RUNS = 4
SIZE = (256, 256)
BATCH = 32
NUM_PASSES = 3
FLOOR = 3.0
MEMORY = "1GB"


class Set(NamedTuple):
    """A set of images: how large they are, and how many."""

    size: tuple[int, int]
    num_images: int
    num_quick: int


SETS = {
    "jpeg": Set(SIZE, 1000, 320),
    "photo": Set((640, 480), 160, 96),
}


def write_images(folder: Path, kind: Set, number: int) -> None:
    """Gradients under grain, so that files are as large, and decoding as slow, as for photos."""
    random = np.random.default_rng(0)
    for index in range(number):
        coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize(kind.size, Image.Resampling.BICUBIC)
        grain = random.integers(-12, 13, (*kind.size[::-1], 1))
        pixels = np.clip(np.asarray(smooth, dtype=np.int16) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:05d}.jpeg", quality=90)


class Images:
    """Files, each decoded and scaled when asked for: uint8 [256, 256, 3], and its number."""

    def __init__(self, folder: Path):
        self._files = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self._files[index]) as image:
            is_right = image.size == SIZE
            scaled = image if is_right else image.resize(SIZE, Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(scaled)), index


# ---- in the ranks, each of which is a run


class Rounds:
    """What one run does in each arm. Every rank must call the same arms in the same order."""

    def __init__(self, world: World, images: Path, places: Path):
        self._rank, self._images, self._places = world.rank, Images(images), places
        self._number = 0
        self.first: dict[str, list[float]] = {}  # seconds of the first pass, by arm

    def alone(self, arm: str) -> float:
        return self._timed(arm, lambda: self._images, seed=self._rank)

    def shared(self, arm: str) -> float:
        opened: list[Cached] = []

        def open_area() -> Cached:
            opened.append(self._open())
            return opened[0]

        took = self._timed(arm, open_area, seed=0 if arm == "same" else self._rank)
        self._check(opened[0])
        self._close(opened[0])
        return took

    def ceiling(self, arm: str) -> float:
        kept = self._open()
        _read(Batches(kept, batch_size=BATCH), 0)
        took = self._timed(arm, lambda: kept, seed=self._rank)
        self._close(kept)
        return took

    def bare(self, arm: str) -> float:
        """What is left of a first pass without a cache around it; the ceiling of `first`."""
        place = self._places.with_name(f"bare-{self._number}")
        if self._rank == 0:
            os.symlink(f"/proc/{os.getpid()}/fd/{os.memfd_create('bare')}", place)
        dist.barrier()
        took = self._timed_bare(os.open(place, os.O_RDWR | os.O_CLOEXEC))
        if self._rank == 0:
            os.close(int(os.readlink(place).rsplit("/", 1)[1]))
        self._number += 1
        self.first.setdefault(arm, []).append(took)
        return took

    def _timed_bare(self, memory: int) -> float:
        number, size = len(self._images) // BATCH * BATCH, math.prod(SIZE) * 3
        dist.barrier()
        started = perf_counter()
        for index in range(self._rank, number, NUM_RUNS):
            os.pwrite(memory, self._images[index][0].numpy(), index * size)
        dist.barrier()
        with mmap.mmap(memory, number * size) as kept, memoryview(kept) as view:
            for start in range(0, number * size, BATCH * size):
                rows = torch.empty((BATCH, *SIZE, 3), dtype=torch.uint8).numpy().reshape(-1).data
                for at in range(0, BATCH * size, size):
                    rows[at : at + size] = view[start + at : start + at + size]
        dist.barrier()
        took = perf_counter() - started
        os.close(memory)
        return took

    def _open(self) -> Cached:
        """An area that was not there before, found by all ranks in one place."""
        os.environ["SHOAL_CACHE"] = str(self._places / str(self._number))
        return cached(self._images, key="images", memory=MEMORY)

    def _close(self, kept: Cached) -> None:
        kept.close()
        dist.barrier()  # nobody joins an area that somebody still leaves
        self._number += 1

    def _timed(self, arm: str, opened: Callable[[], Source], seed: int) -> float:
        dist.barrier()
        started = perf_counter()
        batches = Batches(opened(), batch_size=BATCH, seed=seed)
        _read(batches, 0)
        dist.barrier()
        self.first.setdefault(arm, []).append(perf_counter() - started)
        for number in range(1, NUM_PASSES):
            _read(batches, number)
        dist.barrier()
        return perf_counter() - started

    def _check(self, kept: Cached) -> None:
        """A sample that is wrong is not fast, nor is one that was made twice."""
        for index in range(0, len(self._images), 97):
            if not torch.equal(kept[index][0], self._images[index][0]):
                raise RuntimeError(f"image {index} came out of the cache as another one.")
        made = torch.tensor(kept.num_made)
        dist.all_reduce(made)
        # A last batch that is not full is left out; a busy machine may make a few twice.
        if not len(self._images) - BATCH <= int(made) <= 1.1 * len(self._images):
            raise RuntimeError(f"{int(made)} images were decoded, of {len(self._images)}.")


def _read(batches: Batches, number: int) -> None:
    """One pass over the data."""
    for step in range(batches.steps_per_epoch):
        batches.at(number * batches.steps_per_epoch + step).piece(0)


class Found(msgspec.Struct):
    """Seconds, by arm and round; of the first pass with the warm-up round before the others."""

    whole: dict[str, list[float]]
    first: dict[str, list[float]]


def take_part(world: World, images: str, places: str, length: str) -> Found:
    rounds = Rounds(world, Path(images), Path(places))
    by_arm: dict[str, Callable[[str], float]] = {
        "alone": rounds.alone,
        "same": rounds.shared,
        "other": rounds.shared,
        "again": rounds.alone,
        "ceiling": rounds.ceiling,
        "bare": rounds.bare,
    }
    arms = {arm: partial(measured, arm) for arm, measured in by_arm.items()}
    with harness.quiet():
        whole = harness.interleave(arms, 3 if length == "quick" else 5)
    return Found(whole, rounds.first)


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    for name, kind in SETS.items():
        with tempfile.TemporaryDirectory() as place:
            images = Path(place) / "images"
            images.mkdir()
            write_images(images, kind, kind.num_quick if quick else kind.num_images)
            words = str(images), f"{place}/areas", "quick" if quick else "full"
            found = ranks.start("shared", NUM_RUNS, Found, *words)
        first = {arm: figures[1:] for arm, figures in found.first.items()}
        for order in ("same", "other"):
            yield _row(f"shared/{name}/{order}/first", order, first)
            yield _row(f"shared/{name}/{order}/passes", order, found.whole)


def _row(name: str, order: str, seconds: dict[str, list[float]]) -> Row:
    against = harness.spread(harness.ratios(seconds["alone"], seconds[order]))
    took = {arm: harness.spread(figures).median for arm, figures in seconds.items()}
    ceiling = f"all kept already {took['ceiling']:.2f} s"
    if name.endswith("first"):
        bare = harness.spread(harness.ratios(seconds["alone"], seconds["bare"])).median
        ceiling = f"decoding once and bare copies {took['bare']:.2f} s, {bare:.2f}x"
    return Row(
        name=name,
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"four that decode alone {took['alone']:.2f} s",
        ceiling=ceiling,
        control=harness.spread(harness.ratios(seconds["again"], seconds["alone"])).median,
        note=f"Shoal {took[order]:.2f} s",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(take_part)
    else:
        harness.main(measure)
