"""Looking at every byte of a set of shards, and saying what is wrong with it.

Shards of a directory are mapped and their blocks hashed, on as many cores as there are; those
behind a URL are fetched one after the other, to where temporary files are, and not kept. Needs
no torch. Cost: one read of everything.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.data.shard_files.blocks import OpenShard, halves, mapped
from shoal.data.shard_files.fetching import PART_BYTES, part
from shoal.data.shard_files.format import Index, shard_name
from shoal.data.shard_files.places import Bucket, Place
from shoal.errors import UsageError


def faults(place: Place, index: Index, num_threads: int = 1) -> Iterator[str]:
    """What is wrong, in the order of the shards; nothing if all is well."""
    names = [shard_name(number) for number in range(len(index.shards))]
    for name in sorted(place.names() - set(names)):
        if name.startswith("shard-"):
            yield f"{name} does not belong to it."

    def of_shard(number: int) -> list[str]:
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
                path = _local(place, index, number, Path(folder))
                return list(OpenShard(index, number, *halves(index, number, mapped(path))).faults())
        except UsageError as error:
            return [str(error)]
        except OSError as error:
            return [f"{names[number]} cannot be read: {error.strerror}."]

    if num_threads == 1 or not place.keeps:
        for number in range(len(names)):
            yield from of_shard(number)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-verify") as threads:
        for found in threads.map(of_shard, range(len(names))):
            yield from found


def _local(place: Place, index: Index, number: int, folder: Path) -> Path:
    if not isinstance(place, Bucket):
        return place.local(index, number, ()).path
    path, wanted = folder / "shard", index.num_bytes(index.shards[number])
    with open(path, "wb") as file:
        for start in range(0, wanted, PART_BYTES):
            stop = min(wanted, start + PART_BYTES)
            file.write(part(place.remote, shard_name(number), start, stop))
    return path
