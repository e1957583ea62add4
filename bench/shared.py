"""`shared`: four runs over one set of images on one host, against four that decode alone.

A run is a process that goes through the images once, in batches of 32, and makes each a tensor of
256 x 256 with Pillow; nothing is trained, so nothing else is in the figure. Alone, each does so for
itself. Shared, each reads through `shoal.data.cached` into an area that is new and empty in every
round; making and filling it are in the figure. `same`: all runs have one seed and want the same
images at the same time, as the trials of a tuning do; `other`: each has a seed of its own. The
ceiling is the same reading when all is there already.

Three sets, because the gain depends on what an image costs to make: `jpeg` and `png` are of 256 x
256 already, `photo` is of 640 x 480 and has to be scaled. The figure is the time until the last run
is done, alone over shared. Four runs that never decode anything twice and keep nothing can reach 4.
With fewer cores than runs both sides share them alike.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from bench import harness, ranks
from bench.harness import Row
from shoal.data.cache.cached import Cached, cached
from shoal.data.loader import Batches
from shoal.data.sources import Source
from shoal.world import World

NUM_RUNS = 4
SIZE = (256, 256)
BATCH = 32
FLOOR = 3.0
MEMORY = "1GB"


class Set(NamedTuple):
    """A set of images: how large, how many, and how they are written."""

    size: tuple[int, int]
    num_images: int
    num_quick: int
    form: str
    options: dict[str, int]


SETS = {
    "jpeg": Set(SIZE, 2000, 400, "jpeg", {"quality": 90}),
    "png": Set(SIZE, 600, 200, "png", {}),
    "photo": Set((640, 480), 300, 150, "jpeg", {"quality": 90}),
}


def write_images(folder: Path, kind: Set, number: int) -> None:
    """Gradients under grain, so that files are as large, and decoding as slow, as for photos."""
    random = np.random.default_rng(0)
    for index in range(number):
        coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize(kind.size, Image.Resampling.BICUBIC)
        grain = random.integers(-12, 13, (*kind.size[::-1], 1))
        pixels = np.clip(np.asarray(smooth, dtype=np.int16) + grain, 0, 255).astype(np.uint8)
        path = folder / f"{index:05d}.{kind.form}"
        Image.fromarray(pixels).save(path, **kind.options)


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

    def alone(self) -> float:
        return self._timed(lambda: self._read(self._images, seed=self._rank))

    def shared(self, same: bool) -> float:
        with_cache: list[Cached] = []

        def read() -> None:
            with_cache.append(self._open())
            self._read(with_cache[0], 0 if same else self._rank)

        took = self._timed(read)
        self._check(with_cache[0])
        self._close(with_cache[0])
        return took

    def ceiling(self) -> float:
        kept = self._open()
        self._read(kept, seed=0)
        took = self._timed(lambda: self._read(kept, seed=self._rank))
        self._close(kept)
        return took

    def _open(self) -> Cached:
        """An area that was not there before, found by all ranks in one place."""
        os.environ["SHOAL_CACHE"] = str(self._places / str(self._number))
        return cached(self._images, key="images", memory=MEMORY)

    def _close(self, kept: Cached) -> None:
        kept.close()
        dist.barrier()  # nobody joins an area that somebody still leaves
        self._number += 1

    def _read(self, source: Source, seed: int) -> None:
        batches = Batches(source, batch_size=BATCH, seed=seed)
        for step in range(batches.steps_per_epoch):
            batches.at(step).piece(0)

    def _timed(self, work: Callable[[], None]) -> float:
        dist.barrier()
        started = perf_counter()
        work()
        dist.barrier()
        return perf_counter() - started

    def _check(self, kept: Cached) -> None:
        """A sample that is wrong is not fast, nor is one that was made twice."""
        for index in range(0, len(self._images), 97):
            if not torch.equal(kept[index][0], self._images[index][0]):
                raise RuntimeError(f"image {index} came out of the cache as another one.")
        made = torch.tensor(kept.num_made)
        dist.all_reduce(made)
        # The last batch may be left out.
        if not len(self._images) - BATCH <= int(made) <= 1.02 * len(self._images):
            raise RuntimeError(f"{int(made)} images were decoded, of {len(self._images)}.")


def take_part(world: World, images: str, places: str, length: str) -> dict[str, list[float]]:
    rounds = Rounds(world, Path(images), Path(places))
    arms = {
        "alone": rounds.alone,
        "same": lambda: rounds.shared(same=True),
        "other": lambda: rounds.shared(same=False),
        "again": rounds.alone,
        "ceiling": rounds.ceiling,
    }
    with harness.quiet():
        return harness.interleave(arms, 3 if length == "quick" else 5)


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    for name, kind in SETS.items():
        with tempfile.TemporaryDirectory() as place:
            images = Path(place) / "images"
            images.mkdir()
            write_images(images, kind, kind.num_quick if quick else kind.num_images)
            words = str(images), f"{place}/areas", "quick" if quick else "full"
            found = ranks.start("shared", NUM_RUNS, dict[str, list[float]], *words)
        for order in ("same", "other"):
            yield _row(f"shared/{name}/{order}", order, found)


def _row(name: str, order: str, seconds: dict[str, list[float]]) -> Row:
    against = harness.spread(harness.ratios(seconds["alone"], seconds[order]))
    took = {arm: harness.spread(figures).median for arm, figures in seconds.items()}
    return Row(
        name=name,
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"four that decode alone {took['alone']:.2f} s",
        ceiling=f"all kept already {took['ceiling']:.2f} s",
        control=harness.spread(harness.ratios(seconds["again"], seconds["alone"])).median,
        note=f"Shoal {took[order]:.2f} s",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(take_part)
    else:
        harness.main(measure)
