"""Copy a set of shards to another place, and keep several places alike.

Every block is hashed as it is read, and the copy once more where it lies, before its seal is
written; the copy has the same index and the same seal. A place that has the set whole is left as it
is; one that has it with faults gets it again. A copy that was cut short goes on after the shards
that are there. Cost: one read of everything, and at a directory two.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.data.shard_files.blocks import open_shard
from shoal.data.shard_files.drafts import NOTE, draft_at
from shoal.data.shard_files.format import FORMAT, BadShards, Index, NoShards, encode, shard_name
from shoal.data.shard_files.locations import (
    ShardLocation,
    ShardMirror,
    open_location,
    read_index,
)
from shoal.data.shard_files.verifying import find_faults
from shoal.errors import UsageError
from shoal.logs import log

PART_BYTES = 8 << 20


class SyncedSet(NamedTuple):
    """What a sync found and did."""

    contents: Index
    num_shards: int  # that were copied
    num_bytes: int


def sync(
    source: str | Path,
    target: str | Path,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SyncedSet:
    """Let `target` hold the set that `source` holds, each a directory, a URL or a mirror.

    Of a mirror as target, each place; a target that is away is an error, after the others were
    done. A set of another content is replaced only with `force`. `progress` gets shards and bytes.
    """
    place = open_location(source)
    index = read_index(place)
    to = open_location(target)
    done = SyncedSet(index, 0, 0)
    failed: list[UsageError] = []
    for each in to.places if isinstance(to, ShardMirror) else [to]:
        try:
            copied = copy_set(place, index, each, force, progress or (lambda shards, size: None))
            done = SyncedSet(
                index, done.num_shards + copied.num_shards, done.num_bytes + copied.num_bytes
            )
        except UsageError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return done


def copy_set(
    place: ShardLocation,
    index: Index,
    target: ShardLocation,
    force: bool,
    progress: Callable[[int, int], None],
) -> SyncedSet:
    """Copy a set to one place that is no mirror."""
    assert not isinstance(target, ShardMirror)
    is_same = _holds(target, index)
    if is_same and not any(find_faults(target, index)):
        return SyncedSet(index, 0, 0)
    draft = draft_at(target)
    draft.refuse_others(force or is_same)
    num_shards = num_bytes = 0
    try:
        draft.begin()
        note = msgspec.json.encode({"format": FORMAT, "copy_of": index.digest})
        if draft.read(NOTE) != note:
            draft.clear()
            draft.write(NOTE, [note])
        for number in range(len(index.shards)):
            if draft.is_sound(index, number):
                continue
            draft.write(shard_name(number), _parts(_sound_file(place, index, number)))
            if not draft.is_sound(index, number):
                raise BadShards(f"{shard_name(number)} arrived in {target} with other bytes.")
            num_shards += 1
            num_bytes += index.num_bytes(index.shards[number])
            progress(num_shards, num_bytes)
        draft.commit(encode(index), [])
    except OSError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{target} cannot be written: {error.strerror}. Mend that, and start again; what was "
            "copied is kept."
        ) from error
    finally:
        draft.close(discard=False)
    return SyncedSet(index, num_shards, num_bytes)


def mirror_set(mirror: ShardMirror, index: Index, force: bool) -> None:
    """Copy a set that was built in the first place to the others; enough must get it."""
    first, *others = mirror.places
    num_whole = 1
    for other in others:
        try:
            copy_set(first, index, other, force, lambda shards, size: None)
            num_whole += 1
        except UsageError as error:
            log.warning("%s did not get the set: %s Catch it up with shoal data sync", other, error)
    if num_whole < mirror.quorum:
        raise UsageError(
            f"{first} has the set, and {num_whole} of {len(mirror.places)} places in all, where "
            f"{mirror.quorum} were to have it. Mend the others, and copy it to them: shoal data "
            f"sync {first} PLACE."
        )


def _holds(target: ShardLocation, index: Index) -> bool:
    try:
        return read_index(target).digest == index.digest
    except (NoShards, BadShards):
        return False


def _sound_file(place: ShardLocation, index: Index, number: int) -> Path:
    """A local file of a shard, of which every block was hashed; of a mirror the first sound one."""
    while True:
        path = place.local(index, number, ()).path
        fault = next(iter(open_shard(index, number, path).faults()), None)
        if fault is None:
            return path
        if not isinstance(place, ShardMirror) or not place.drop(index, number):
            raise BadShards(f"{place}: {fault} It is not copied.")


def _parts(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            yield part
