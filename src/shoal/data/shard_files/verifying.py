"""Looking at every byte of a set of shards, and saying what is wrong with it.

Shards of a directory are mapped and their blocks hashed, on as many cores as there are; those
behind a URL are fetched one after the other, to where temporary files are, and not kept. A store
or a disk that is not reached is no fault of the set: it ends the verification. Needs no torch.
Cost: one read of everything.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.data.shard_files.blocks import open_shard
from shoal.data.shard_files.fetching import fetch_to
from shoal.data.shard_files.format import BadShards, Index, shard_name
from shoal.data.shard_files.locations import ShardBucket, ShardLocation, ShardMirror
from shoal.errors import UsageError


def find_faults(place: ShardLocation, index: Index, num_threads: int = 1) -> Iterator[str]:
    """What is wrong, in the order of the shards; nothing if all is well. Of a mirror, in each."""
    if isinstance(place, ShardMirror):
        for each in place.places:
            yield from (f"{each}: {fault}" for fault in find_faults(each, index, num_threads))
        return
    names = [shard_name(number) for number in range(len(index.shards))]
    for name in sorted(place.names() - set(names)):
        if name.startswith("shard-"):
            yield f"{name} does not belong to it."

    def of_shard(number: int) -> list[str]:
        try:
            return _faults_of(place, index, number)
        except BadShards as bad:
            return [str(bad)]
        except OSError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{names[number]} of {place} cannot be looked at: {error.strerror}. Mend that, "
                "and verify it again."
            ) from error

    if num_threads == 1 or not place.keeps:
        for number in range(len(names)):
            yield from of_shard(number)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-verify") as threads:
        for found in threads.map(of_shard, range(len(names))):
            yield from found


def _faults_of(place: ShardLocation, index: Index, number: int) -> list[str]:
    if not isinstance(place, ShardBucket):
        return list(open_shard(index, number, place.local(index, number, ()).path).faults())
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        path = Path(folder) / "shard"
        fetch_to(place.remote, index, number, path)
        return list(open_shard(index, number, path).faults())
