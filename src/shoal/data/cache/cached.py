"""`cached(source)`: a source whose samples are made once and kept, for all ranks and runs.

    images = shoal.data.images("photos")
    decoded = shoal.data.cached(images, memory="4GB", disk="/scratch/samples")
    data = shoal.data.mapped(decoded, augment)

Put it after what is expensive and always the same (reading, decoding, resizing) and before what
varies from pass to pass: a source that varies is refused, since its first pass would be frozen.

A sample that no layer has is made by one process: it claims the sample (`ranges.py`), and others
that want it make another one of their batch meanwhile and come back for it. So runs that walk the
same order share the work instead of doing it side by side. A claim goes with its process; whoever
waited for two seconds makes the sample itself. A source that gives many records in one call is
asked for sixteen at a time. A sample comes out of the cache as it comes out when it was just made,
so that the first pass is like the others: tuples, lists, dicts, tensors, arrays, numbers, text and
bytes (`data/packing.py`).

Cost: packing and hashing when made; two copies and a hash when found. Not for samples that
are quicker to make than to copy, such as rows of tensors in memory.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shoal.data.cache.disk import Disk
from shoal.data.cache.identity import name_samples
from shoal.data.cache.joining import join_area
from shoal.data.cache.layers import Layer, Row
from shoal.data.cache.memcached import memcached_layer
from shoal.data.cache.ranges import MOST, Ranges
from shoal.data.cache.redis import redis_layer
from shoal.data.cache.rows import Rows, Unlike
from shoal.data.collating import collate_samples
from shoal.data.given import path_of, text_of
from shoal.data.packing import BadSample, pack, unpack
from shoal.data.readers.records import Many, ask_many
from shoal.data.sources import Ids, Source, Varied, as_source, position
from shoal.errors import RecipeError, UsageError
from shoal.tables import num_bytes_of

DISK_BYTES = "10GB"
_PATIENCE_S = 2.0  # for a sample that another process is making
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0002, 0.002
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
    if isinstance(source, Varied):
        raise UsageError(
            f"cached() was given a {type(source).__name__} whose samples differ from pass to pass "
            "(an augmentation). A cache would give those of the first pass for ever. Put it "
            "before: mapped(cached(source), augment)."
        )
    if disk is None and disk_bytes is not None:
        raise UsageError(
            f"cached(disk_bytes={disk_bytes!r}) has no effect without a disk. Name the directory, "
            "disk='DIR', or leave disk_bytes out."
        )
    identity = name_samples(source, key)
    layers: list[Layer] = []
    ranges: Ranges | None = None  # of the nearest layer that has some
    if memory is not None:
        area = join_area(num_bytes_of(memory, "memory"))
        layers.append(area)
        ranges = area.ranges
    if disk is not None:
        path = Path(path_of(disk, "cached(disk=...)"))
        most = DISK_BYTES if disk_bytes is None else disk_bytes
        directory = Disk(path, num_bytes_of(most, "disk_bytes"))
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
        self, source: Source, identity: str, layers: Sequence[Layer], ranges: Ranges | None
    ):
        self.source = source
        self._num_made = 0
        self._identity = identity
        self._prefix = xxhash.xxh3_128_digest(identity.encode(errors="surrogatepass"))
        self._row = Row(layers)
        self._ranges = ranges
        self._num_at_once = _AT_ONCE if isinstance(source, Many) else 1
        self._is_keeping = True
        self._is_open = True
        for name in ("order", "record"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return next(self._samples([position(index, len(self))]))[1]

    def take(self, ids: Ids) -> tuple[Any, Any]:
        rows = Rows(len(ids))
        try:
            for row, sample in self._samples([int(index) for index in ids]):
                rows.place(row, sample)
        except Unlike:  # collated at once, which takes more kinds of samples or says what is wrong
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

    def _samples(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Each sample with its place in `ids`, in the order in which they can be had."""
        absent, of_others = [], []
        for place, index in enumerate(ids):
            packed = self._row.get(self._key(index))
            if packed is None:
                absent.append(place)
            else:
                yield place, self._sample(index, packed)
        for start in range(0, len(absent), self._num_at_once):
            places = absent[start : start + self._num_at_once]
            made = self._made({place: ids[place] for place in places})
            for place in places:
                packed = made.get(place)
                if packed is None:
                    of_others.append(place)
                else:
                    yield place, self._sample(ids[place], packed)
        for place in of_others:
            yield place, self._sample(ids[place], self._awaited(ids[place]))

    def _sample(self, index: int, packed: bytearray) -> Any:
        try:
            return unpack(packed)
        except BadSample:  # sealed by another who packs in another way
            return unpack(self._pack(index, self.source[index]))

    def _made(self, wanted: Mapping[int, int]) -> Mapping[int, bytearray | None]:
        """For each place its packed sample, but for those that other processes are making."""
        claims = self._ranges if self._is_keeping else None
        if claims is None:  # with no room left there is nothing to wait for
            return self._make(wanted)
        claimed = {p: i for p, i in wanted.items() if claims.try_lock(self._number(i))}
        try:
            # The one who had it may have kept it between our look and our claim.
            kept = {p: self._row.layers[0].get(self._key(i)) for p, i in claimed.items()}
            return kept | self._make({p: i for p, i in claimed.items() if kept[p] is None})
        finally:
            for index in claimed.values():
                claims.unlock(self._number(index))

    def _make(self, wanted: Mapping[int, int]) -> dict[int, bytearray | None]:
        samples = ask_many(self.source, list(wanted.values())) if wanted else []
        made: dict[int, bytearray | None] = {}
        for at, (place, index) in enumerate(wanted.items()):
            sample = self.source[index] if samples is None else samples[at]
            made[place] = self._keep(index, sample)
        return made

    def _awaited(self, index: int) -> bytearray:
        """The packed sample that another process is making, or one made here when time is up."""
        deadline, pause_s = time.monotonic() + _PATIENCE_S, _LEAST_PAUSE_S
        while time.monotonic() < deadline:
            packed = self._made({0: index}).get(0)
            if packed is not None:
                return packed
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return self._keep(index, self.source[index])

    def _keep(self, index: int, sample: Any) -> bytearray:
        packed = self._pack(index, sample)
        self._is_keeping = self._row.put(self._key(index), packed)
        return packed

    def _pack(self, index: int, sample: Any) -> bytearray:
        self._num_made += 1
        try:
            return pack(sample)
        except RecipeError as error:
            raise RecipeError(f"sample {index} cannot be cached: {error}") from None

    def _number(self, index: int) -> int:
        """What is locked while a sample is made."""
        return 1 + int.from_bytes(self._key(index)[:8], "little") % (MOST - 1)

    def _key(self, index: int) -> bytes:
        return xxhash.xxh3_128_digest(self._prefix + index.to_bytes(8, "little"))
