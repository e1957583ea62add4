"""How many samples a second come out of 1 GB of token blocks, shuffled, in batches of 64.

A sample is a block of 1,022 tokens (int32) and a label, 4 KB together, and 262,144 of them make up
1 GB, in the page cache. Shoal reads shards of 64 MiB through `Batches`, as a run does. Peers are
torch's DataLoader over a map-style dataset on one memory-mapped file of the same rows, with 0 and
with 2 workers, and Hugging Face datasets in Arrow files. The ceiling copies the same rows, in the
order of a shuffle, from memory into one buffer that stays.

All arms go on through the data from round to round, so the figures are those of a run under way:
every block has been hashed, every page was seen. The first pass, in which Shoal hashes each block,
is measured beside and told in a note; so is a DataLoader whose dataset fetches a batch in one call
(`__getitems__`), which few have. Workers are up and filled before the clock starts.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench import harness
from bench.harness import Row
from shoal.data.batches import Batches
from shoal.data.shard_files.reading import shards
from shoal.data.shard_files.writing import build

NUM_TOKENS = 1022
ROW_BYTES = 4096
BATCH = 64
NUM_SAMPLES, NUM_QUICK = 262_144, 32_768
FLOORS = {"workers": 10.0, "plain": 5.0, "huggingface": 5.0}
FLOOR_OF_MEMCPY, AIM_OF_MEMCPY = 0.25, 0.5

Figures = dict[str, list[float]]
Arm = Callable[[], float]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """One mapped file, a row at a time: what one would write by hand."""

    def __init__(self, path: Path):
        self.rows: NDArray[np.int32] = np.memmap(path, np.int32, "c").reshape(-1, ROW_BYTES // 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.from_numpy(self.rows[index])
        return row[:NUM_TOKENS], row[NUM_TOKENS:].view(torch.int64)[0]


class WholeBatches(Rows):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.rows[indices])
        return rows[:, :NUM_TOKENS].contiguous(), rows[:, NUM_TOKENS:].view(torch.int64)[:, 0]


def write_rows(path: Path, num_samples: int) -> None:
    """Tokens at random; the label is the row's number, and its first token tells it too."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for first in range(0, num_samples, 8192):
            rows = rng.integers(0, 50_000, (min(8192, num_samples - first), ROW_BYTES // 4))
            rows = rows.astype(np.int32)
            labels = np.arange(first, first + len(rows))
            rows[:, 0] = first_token(labels)
            rows[:, NUM_TOKENS:] = labels.view(np.int32).reshape(-1, 2)
            rows.tofile(file)


def first_token(labels: Any) -> Any:
    return labels * 7919 % 50_021


def check(inputs: Tensor, target: Tensor) -> None:
    """A fast loader of wrong samples is none."""
    right = (inputs[:, 0] == first_token(target)).all()
    if inputs.shape != (BATCH, NUM_TOKENS) or target.shape != (BATCH,) or not right:
        raise RuntimeError("The samples of a batch do not belong together.")


class Loader:
    """A DataLoader that goes on from round to round, pass after pass."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._batches = iter(loader)
        check(*self._pair(next(self._batches)))

    def __call__(self, num_steps: int) -> float:
        started = perf_counter()
        came = sum(1 for _ in islice(self._batches, num_steps))
        while came < num_steps:
            self._batches = iter(self._loader)
            came += sum(1 for _ in islice(self._batches, num_steps - came))
        return num_steps * BATCH / (perf_counter() - started)

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        return (batch["tokens"], batch["label"]) if isinstance(batch, dict) else tuple(batch)


class Shoal:
    """Batches of a run, step after step."""

    def __init__(self, folder: Path):
        self._batches = Batches(shards(folder), batch_size=BATCH)
        self._step = 0
        piece = self._batches.at(0).piece(0)
        check(piece.inputs, piece.target)

    def __call__(self, num_steps: int) -> float:
        batches, first = self._batches, self._step
        started = perf_counter()
        for step in range(first, first + num_steps):
            batches.at(step).piece(0)
        self._step += num_steps
        return num_steps * BATCH / (perf_counter() - started)

    @property
    def steps_per_epoch(self) -> int:
        return self._batches.steps_per_epoch


def first_pass(folder: Path) -> float:
    """Open the set and go through all of it once."""
    fresh = Shoal(folder)
    return fresh(fresh.steps_per_epoch - 1)


def copy_rows(path: Path) -> Callable[[int], float]:
    """The ceiling: nothing but the copies."""
    rows = np.fromfile(path, np.int64).reshape(-1, ROW_BYTES // 8)
    turn = np.random.default_rng(0).permutation(len(rows)).reshape(-1, BATCH)
    out = np.empty((BATCH, ROW_BYTES // 8), np.int64)
    at = 0

    def copy(num_steps: int) -> float:
        nonlocal at
        started = perf_counter()
        for step in range(at, at + num_steps):
            np.take(rows, turn[step % len(turn)], axis=0, out=out, mode="clip")
        at += num_steps
        return num_steps * BATCH / (perf_counter() - started)

    return copy


def arrow(path: Path, folder: Path) -> Any:
    """The rows as a Hugging Face dataset in Arrow files, mapped, as torch tensors."""
    import datasets
    import pyarrow

    datasets.disable_progress_bars()
    rows = np.memmap(path, np.int32, "r").reshape(-1, ROW_BYTES // 4)
    tokens = pyarrow.FixedSizeListArray.from_arrays(
        pyarrow.array(rows[:, :NUM_TOKENS].reshape(-1)), NUM_TOKENS
    )
    labels = pyarrow.array(np.arange(len(rows)))
    table = pyarrow.table({"tokens": tokens, "label": labels})
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder)).with_format("torch")


def measure(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    num_samples = NUM_QUICK if quick else NUM_SAMPLES
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder, path = Path(name), Path(name) / "rows.bin"
        write_rows(path, num_samples)
        build(Rows(path), folder / "shards", workers=2)
        shoal, loader = (
            Shoal(folder / "shards"),
            partial(DataLoader, batch_size=BATCH, shuffle=True),
        )
        shoal(shoal.steps_per_epoch)  # every block is hashed from now on
        with_workers = loader(Rows(path), num_workers=2, persistent_workers=True)
        few, many = (32, 256) if quick else (128, 2048)
        arms: dict[str, Arm] = {
            "shoal": partial(shoal, many),
            "workers": partial(Loader(with_workers), few),
            "plain": partial(Loader(loader(Rows(path))), few),
            "again": partial(Loader(loader(Rows(path))), few),
            "whole": partial(Loader(loader(WholeBatches(path), collate_fn=_as_it_is)), many),
            "memcpy": partial(copy_rows(path), many),
            "first": partial(first_pass, folder / "shards"),
        }
        if importlib.util.find_spec("datasets") is not None:
            arms["huggingface"] = partial(Loader(loader(arrow(path, folder / "arrow"))), few)
        with harness.quiet():
            figures = harness.interleave(arms, 5 if quick else 9)
        yield from _rows(figures)


def _as_it_is(batch: Any) -> Any:
    return batch


def _rows(figures: Figures) -> Iterator[Row]:
    medians = {arm: harness.spread(of_arm).median for arm, of_arm in figures.items()}
    control = harness.spread(harness.ratios(figures["again"], figures["plain"])).median
    words = {
        "workers": "DataLoader with 2 workers",
        "plain": "DataLoader without workers",
        "huggingface": "Hugging Face datasets",
    }
    of_whole = harness.spread(harness.ratios(figures["shoal"], figures["whole"])).median
    notes = {"plain": f"{of_whole:.2f}x a DataLoader whose dataset fetches whole batches"}
    for peer, floor in FLOORS.items():
        if peer not in figures:
            yield Row(name=f"load/{peer}", floor=floor, note=f"{words[peer]} is not installed")
            continue
        found = harness.spread(harness.ratios(figures["shoal"], figures[peer]))
        yield Row(
            name=f"load/{peer}",
            value=found.median,
            low=found.low,
            high=found.high,
            num_pairs=found.num_pairs,
            floor=floor,
            peer=f"{words[peer]} {medians[peer]:,.0f} samples/s",
            ceiling=f"memcpy {medians['memcpy']:,.0f}",
            control=control,
            note=notes.get(peer, f"Shoal {medians['shoal']:,.0f} samples/s"),
        )
    found = harness.spread(harness.ratios(figures["shoal"], figures["memcpy"]))
    first = harness.spread(harness.ratios(figures["first"], figures["memcpy"])).median
    yield Row(
        name="load/memcpy",
        value=found.median,
        low=found.low,
        high=found.high,
        num_pairs=found.num_pairs,
        floor=FLOOR_OF_MEMCPY,
        peer=f"memcpy {medians['memcpy']:,.0f} samples/s",
        ceiling="the peer itself",
        note=f"aim {AIM_OF_MEMCPY}; {first:.2f} in a first pass, with every block hashed",
    )


if __name__ == "__main__":
    harness.main(measure)
