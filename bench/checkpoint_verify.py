"""How many GB of a checkpoint one core verifies in a second.

The checkpoint is that of `bench/checkpoint_load.py`: 240 MB in four files, in the page cache. A
round opens it and verifies it in one thread, so the manifest, the headers and the mapping of the
files are in the figure. The peer hashes the mapped files with nothing else around, each in one
call; the ceiling hashes the same bytes where they are in memory already.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

import xxhash

from bench import checkpoint_load, harness
from bench.harness import Row
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.storage.store import DirectoryStore

FLOOR = 2.0


def verify(folder: Path) -> None:
    VerifiedCheckpoint(DirectoryStore(folder), checkpoint_load.SAVED).verify(1)


def hash_mapped(files: Sequence[Path]) -> None:
    """Map each file anew, as opening a checkpoint does, and hash it."""
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            xxhash.xxh3_128_digest(content)


def hash_memory(contents: Sequence[bytes]) -> None:
    for content in contents:
        xxhash.xxh3_128_digest(content)


def check_finds_faults(folder: Path) -> None:
    """What accepts a flipped bit is not a verification."""
    damaged = min(folder.glob(f"{checkpoint_load.SAVED}/*.safetensors"))
    with damaged.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        for content in (bytes([last[0] ^ 1]), last):  # the second puts it back
            file.seek(-1, os.SEEK_END)
            file.write(content)
            file.flush()
            num_faults = len(
                list(VerifiedCheckpoint(DirectoryStore(folder), checkpoint_load.SAVED).faults())
            )
            if num_faults != (content != last):
                raise RuntimeError(
                    f"With {int(content != last)} bits flipped, {num_faults} chunks were bad."
                )


def measure(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint_load.save_with_ranks(folder)
        harness.pin(0)
        check_finds_faults(folder)
        files = sorted((folder / checkpoint_load.SAVED).iterdir())
        contents = [path.read_bytes() for path in files]

        def arm(work: Callable[[], None]) -> Callable[[], float]:
            def speed() -> float:
                """GB a second."""
                started = perf_counter()
                work()
                return sum(map(len, contents)) / (perf_counter() - started) / 1e9

            return speed

        arms = {
            "mapped": arm(lambda: hash_mapped(files)),
            "shoal": arm(lambda: verify(folder)),
            "again": arm(lambda: hash_mapped(files)),
            "memory": arm(lambda: hash_memory(contents)),
        }
        with harness.quiet():
            yield _row(harness.interleave(arms, 10 if quick else 40, num_warm_up=2))


def _row(speeds: dict[str, list[float]]) -> Row:
    own = harness.spread(speeds["shoal"])
    of_peer = harness.spread(harness.ratios(speeds["shoal"], speeds["mapped"])).median
    medians = {arm: harness.spread(figures).median for arm, figures in speeds.items()}
    return Row(
        name="checkpoint-verify",
        value=own.median,
        low=own.low,
        high=own.high,
        num_pairs=own.num_pairs,
        unit="GB/s",
        floor=FLOOR,
        peer=f"xxh3_128 of the mapped files {medians['mapped']:.1f} GB/s",
        ceiling=f"xxh3_128 of memory {medians['memory']:.1f} GB/s",
        control=harness.spread(harness.ratios(speeds["again"], speeds["mapped"])).median,
        note=f"{of_peer:.2f} of the mapped files' speed",
    )


if __name__ == "__main__":
    harness.main(measure)
