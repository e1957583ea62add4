"""`cached(source)`: a source whose samples are made once and kept, for all ranks and runs.

    images = shoal.data.images("photos")
    decoded = shoal.data.cached(images, memory="4GB", disk="/scratch/samples")
    data = shoal.data.mapped(decoded, augment)

Put it after what is expensive and always the same (reading, decoding, resizing) and before what
varies from pass to pass: a source that varies is refused, since its first pass would be frozen.

A sample that no layer has is made by one process: it locks the sample (`range_locks.py`), and
others that need it make another one of their batch meanwhile and come back for it. So runs with the
same order share the work. A lock ends with its process; a process that waited for two seconds makes
the sample itself. A source that gives many records in one call is asked for sixteen at a time. A
sample comes out of the cache as it comes out when it was just made, so that the first pass is like
the others: tuples, lists, dicts, tensors, arrays, numbers, text and bytes (`data/packing.py`).

Cost: hashing and a copy when made; a copy and a hash when found in memory, straight into the row of
a batch (`batch_rows.py`). Not for samples that are quicker to make than to copy, such as rows of
tensors in memory. Next: `layers.py` for the tiers, `keys.py` for the keys.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shoal.data.cache.batch_rows import BatchBuffer, RowMismatch
from shoal.data.cache.disk import DiskLayer
from shoal.data.cache.host_memory import attach_host_memory
from shoal.data.cache.keys import name_samples
from shoal.data.cache.layers import CacheLayer, TieredCache
from shoal.data.cache.memcached import memcached_layer
from shoal.data.cache.memory import MemoryLayer
from shoal.data.cache.range_locks import NUM_LOCKS, RangeLocks
from shoal.data.cache.redis import redis_layer
from shoal.data.collating import collate_samples
from shoal.data.packing import BadSample, BytesLike, pack_parts, unpack
from shoal.data.readers.records import BulkSource, load_many
from shoal.data.sources import EpochSource, Ids, Source, as_source, normalize_index
from shoal.data.validate import path_of, text_of
from shoal.errors import RecipeError, UsageError
from shoal.formatting import num_bytes_of

DISK_BYTES = "10GB"
_PATIENCE_S = 2.0  # for a sample that another process is making
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0002, 0.0005
_AT_ONCE = 16  # samples that are asked for together; others may not make them meanwhile


def cached(
    source: Any,
    *,
    key: str | None = None,
    memory: str | int | None = "1GB",
    disk: str | Path | None = None,
    disk_bytes: str | int | None = None,
    redis: str | None = None,
    memcached: str | None = None,
) -> "Cached":
    """The source, its samples kept in the layers that are given, the nearest first.

    `key` names the data; a source that has `identity()` needs none. `memory` is shared by all runs
    of the host and goes with the last of them, `disk` is a directory that stays and holds up to
    `disk_bytes` (10GB), `redis` a URL and `memcached` an address host:port.
    """
    source = as_source(source)
    if isinstance(source, EpochSource):
        raise UsageError(
            f"cached() was given a {type(source).__name__} whose samples differ from pass to pass "
            "(an augmentation). A cache would give those of the first pass in all others. Put it "
            "before: mapped(cached(source), augment)."
        )
    if disk is None and disk_bytes is not None:
        raise UsageError(
            f"cached(disk_bytes={disk_bytes!r}) has no effect without a disk. Name the directory, "
            "disk='DIR', or leave disk_bytes out."
        )
    identity = name_samples(source, key)
    layers: list[CacheLayer] = []
    ranges: RangeLocks | None = None  # of the nearest layer that has some
    if memory is not None:
        area = attach_host_memory(num_bytes_of(memory, "memory"))
        layers.append(area)
        ranges = area.ranges
    if disk is not None:
        path = Path(path_of(disk, "cached(disk=...)"))
        most = DISK_BYTES if disk_bytes is None else disk_bytes
        directory = DiskLayer(path, num_bytes_of(most, "disk_bytes"))
        layers.append(directory)
        ranges = ranges or directory.ranges
    if redis is not None:
        layers.append(redis_layer(text_of(redis, "cached(redis=...)")))
    if memcached is not None:
        layers.append(memcached_layer(text_of(memcached, "cached(memcached=...)")))
    if not layers:
        raise UsageError(
            "cached() was given nothing to keep samples in. Give at least one of memory, disk, "
            "redis and memcached."
        )
    return Cached(source, identity, layers, ranges)


class Cached:
    """A source with its cache; made by `cached`."""

    def __init__(
        self, source: Source, identity: str, layers: Sequence[CacheLayer], ranges: RangeLocks | None
    ):
        self.source = source
        self._num_made = 0
        self._identity = identity
        self._prefix = xxhash.xxh3_128_digest(identity.encode(errors="surrogatepass"))
        self._row = TieredCache(layers)
        self._area = layers[0] if isinstance(layers[0], MemoryLayer) else None
        self._ranges = ranges
        self._num_at_once = _AT_ONCE if isinstance(source, BulkSource) else 1
        self._is_keeping = True
        self._is_open = True
        for name in ("order", "record"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        index = normalize_index(index, len(self))
        packed = self._row.get(self._key(index))
        if packed is None:
            packed = self._awaited(index)
        return self._sample(index, packed)

    def take(self, ids: Ids) -> tuple[Any, Any]:
        rows = BatchBuffer(len(ids))
        try:
            self._fill(rows, [int(index) for index in ids])
        except RowMismatch:
            # Collated at once, which takes more kinds of samples or says what is wrong.
            return collate_samples([self[int(index)] for index in ids], None, np.asarray(ids))
        return rows.pair()

    @property
    def num_made(self) -> int:
        """How many samples this process made, rather than found."""
        return self._num_made

    def identity(self) -> str:
        """What its samples are samples of."""
        return self._identity

    def close(self) -> None:
        """Let go of the layers. The memory goes when no process has it any more."""
        if self._is_open:
            self._is_open = False
            self._row.close()

    def _fill(self, rows: BatchBuffer, ids: Sequence[int]) -> None:
        """Every sample into its row, in the order in which they can be had."""
        absent = [row for row, index in enumerate(ids) if not self._found(rows, row, index)]
        of_others = []
        for start in range(0, len(absent), self._num_at_once):
            chosen = absent[start : start + self._num_at_once]
            # Others may have made it since: runs with one order are at the same batch.
            wanted = {row: ids[row] for row in chosen if not self._copied(rows, row, ids[row])}
            made = self._made(wanted)
            for row, index in wanted.items():
                if row in made:
                    self._place(rows, row, index, made[row])
                else:
                    of_others.append(row)
        for row in of_others:
            if not self._found(rows, row, ids[row]):
                rows.place(row, self._sample(ids[row], self._awaited(ids[row])))

    def _found(self, rows: BatchBuffer, row: int, index: int) -> bool:
        """Whether a layer had the sample, which then is in its row."""
        if self._copied(rows, row, index):
            return True
        packed = self._row.get(self._key(index))
        if packed is None:
            return False
        if rows.copy(row, memoryview(packed)) is None:
            rows.place(row, self._sample(index, packed))
        return True

    def _copied(self, rows: BatchBuffer, row: int, index: int) -> bool:
        """Whether the sample was in memory, packed as those before it, and is now in its row."""
        area = self._area
        return area is not None and area.take(self._key(index), partial(rows.copy, row))

    def _place(self, rows: BatchBuffer, row: int, index: int, parts: Sequence[BytesLike]) -> None:
        if rows.fill(row, parts) is None:
            rows.place(row, self._sample(index, bytearray().join(parts)))

    def _sample(self, index: int, packed: bytearray) -> Any:
        try:
            return unpack(packed)
        except BadSample:  # sealed by another who packs in another way
            return unpack(bytearray().join(self._pack(index, self.source[index])))

    def _made(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[BytesLike]]:
        """For each row its packed sample, but for those that other processes are making."""
        claims = self._ranges if self._is_keeping else None
        if claims is None:  # with no room left there is nothing to wait for
            return self._make(wanted)
        claimed = {row: i for row, i in wanted.items() if claims.try_lock(self._number(i))}
        try:
            # The one who had it may have kept it between our look and our claim.
            looks = {row: self._row.layers[0].get(self._key(i)) for row, i in claimed.items()}
            kept = {row: [packed] for row, packed in looks.items() if packed is not None}
            return kept | self._make({r: i for r, i in claimed.items() if r not in kept})
        finally:
            for index in claimed.values():
                claims.unlock(self._number(index))

    def _make(self, wanted: Mapping[int, int]) -> dict[int, Sequence[BytesLike]]:
        samples = self._asked(list(wanted.values()))
        made: dict[int, Sequence[BytesLike]] = {}
        for at, (row, index) in enumerate(wanted.items()):
            sample = self.source[index] if samples is None else samples[at]
            made[row] = self._keep(index, sample)
        return made

    def _asked(self, ids: list[int]) -> list[Any] | None:
        """What `load_many` gives; whether the source has it is known, and slow to find out."""
        return load_many(self.source, ids) if self._num_at_once > 1 and ids else None

    def _awaited(self, index: int) -> bytearray:
        """The packed sample that another process is making, or one made here when time is up."""
        deadline, pause_s = time.monotonic() + _PATIENCE_S, _LEAST_PAUSE_S
        while time.monotonic() < deadline:
            parts = self._made({0: index}).get(0)
            if parts is not None:
                return bytearray().join(parts)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return bytearray().join(self._keep(index, self.source[index]))

    def _keep(self, index: int, sample: Any) -> Sequence[BytesLike]:
        parts = self._pack(index, sample)
        self._is_keeping = self._row.put(self._key(index), *parts)
        return parts

    def _pack(self, index: int, sample: Any) -> Sequence[BytesLike]:
        """The sample's parts, whose arrays are the sample's own."""
        self._num_made += 1
        try:
            return pack_parts(sample)
        except RecipeError as error:
            raise RecipeError(f"sample {index} cannot be cached: {error}") from None

    def _number(self, index: int) -> int:
        """What is locked while a sample is made."""
        return 1 + int.from_bytes(self._key(index)[:8], "little") % (NUM_LOCKS - 1)

    def _key(self, index: int) -> bytes:
        return xxhash.xxh3_128_digest(self._prefix + index.to_bytes(8, "little"))
