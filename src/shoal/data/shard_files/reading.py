"""Shards as a source: samples by number, batches in one gather, every byte checked before its use.

    shoal.data.shards("data/tokens")
    shoal.data.shards("s3://bucket/tokens", cache_dir="/scratch/shards")
    shoal.data.shards(["data/tokens-1", "data/tokens-2"])

Shards of a directory are mapped, those behind a URL are first copied to a local directory of
limited size, up to four of a batch beside each other. A block is hashed when it is first touched;
its samples are then given out as copies, so the map cannot be written to. A sample whose shard is
missing, cut short or damaged is a `LostSample` with its number, the shard and the reason; under
`shoal.data.quarantine` a run skips it. A store that does not answer, or a cache whose
disk is full, is `SourceLost` and ends the run: it says nothing of the sample.

Cost: one copy of what is asked for. A first pass also hashes all blocks, at some 10 GB/s. A lone
first sample reads a block of 64 KiB. A file that is truncated while it is mapped ends the process
(SIGBUS): never write into a set, build a new one. Threads may share a source, and forks use it.
Next: `format.py`, `region.py`; docs/how-to/shards.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.orders import BlockShuffled
from shoal.data.packing import BadSample, unpack
from shoal.data.readers.records import Indices, normalize_indices
from shoal.data.shard_files import layout
from shoal.data.shard_files.blocks import InflatedBlocks, OpenShard, split_shard
from shoal.data.shard_files.format import BadShards, Index, RowLayout, shard_name
from shoal.data.shard_files.locations import ShardLocation, open_location, read_index
from shoal.data.shard_files.region import GRANULE, MappedRegion, map_file
from shoal.data.shard_files.shard_source import AT_ONCE, LostSample, ShardSource
from shoal.data.sources import Ids, normalize_index
from shoal.data.views import View, join
from shoal.errors import UsageError

__all__ = ["LostSample", "PackedSource", "RowSource", "open_set", "shards"]

_NUM_NAMED = 3  # of the shards that are missing
_WAY_OUT = (
    "Copy the set there again or build it again; with strict=False it opens, and the samples that "
    "are not there are lost."
)


class PackedSource(ShardSource):
    """Samples that differ in shape or hold more than numbers."""

    def __init__(self, place: ShardLocation, index: Index):
        super().__init__(place, index)
        self._inflated = InflatedBlocks() if index.compression is not None else None

    def many(self, ids: Indices) -> list[Any]:
        """Many samples; those of remote shards after some of these were fetched together."""
        wanted = normalize_indices(ids, len(self))
        shards = self._shards_of(wanted)
        numbers = np.unique(shards).tolist()
        found: list[Any] = [None] * len(wanted)
        for start in range(0, len(numbers), AT_ONCE):
            some = numbers[start : start + AT_ONCE]
            self._fetch(some, some)
            for place in np.flatnonzero(np.isin(shards, some)):
                found[place] = self[int(wanted[place])]
        return found

    def __getitem__(self, index: int) -> Any:
        sample = normalize_index(index, len(self))
        number = int(self._shards_of(np.array([sample]))[0])
        at = sample - int(self._firsts[number])
        with self._while_used(np.array([sample])):
            packed = self._looked_at(sample, number, (number,), lambda shard: self._cut(shard, at))
        try:
            return unpack(packed)
        except BadSample as bad:
            raise self._lost(sample, bad) from bad

    def _cut(self, shard: OpenShard, at: int) -> bytearray:
        """The bytes of a shard's sample, for it alone."""
        assert shard.table.offsets is not None
        start, stop = shard.table.offsets[at : at + 2].tolist()
        block = int(np.searchsorted(shard.table.raw, start, side="right")) - 1
        first = int(shard.table.raw[block])
        if self._inflated is None:
            content: bytes | memoryview = shard.stored(block)
        else:
            content = self._inflated.block(shard, block)
        return bytearray(content[start - first : stop - first])


class RowSource(ShardSource, ABC):
    """Samples that are rows of one length; if they are pairs, many are taken at once."""

    def __init__(self, place: ShardLocation, index: Index, rows: RowLayout):
        super().__init__(place, index)
        self._rows, self._blocks_a_shard = rows, rows.shard_rows // rows.block_rows
        if layout.is_pair(rows):
            self.take = self._take

    def __getitem__(self, index: int) -> Any:
        ids = np.asarray([normalize_index(index, len(self))], dtype=np.int64)
        return layout.decode_row(self._rows, self._copied(ids)[0])

    def many(self, ids: Indices) -> list[Any]:
        """Many samples, out of one copy of their rows."""
        return [
            layout.decode_row(self._rows, row)
            for row in self._copied(normalize_indices(ids, len(self)))
        ]

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        """The collated samples `ids`."""
        # As unsigned numbers, those below 0 are the largest.
        if len(ids) and int(ids.view(np.uint64).max()) >= len(self):
            raise IndexError(f"samples {ids.min()} to {ids.max()} of {len(self)}")
        inputs, target = self._batch(ids)
        return inputs, target

    @abstractmethod
    def _copied(self, ids: Ids) -> Tensor:
        """Whole rows, [ids, row_bytes]."""

    @abstractmethod
    def _batch(self, ids: Ids) -> Any:
        """The collated samples, as one."""

    def _by_block(self, ids: Ids) -> Iterator[tuple[int, int, Ids]]:
        """The shard and block of samples, once each, and where in `ids` its samples stand."""
        blocks, inverse = np.unique(ids // self._rows.block_rows, return_inverse=True)
        turn = np.argsort(inverse, kind="stable")
        edges = np.searchsorted(inverse[turn], np.arange(1, len(blocks)))
        for block, here in zip(blocks.tolist(), np.split(turn, edges), strict=True):
            yield *divmod(block, self._blocks_a_shard), here


class MappedRows(RowSource):
    """Rows as they lie in the files, side by side in memory: a batch is one gather."""

    def __init__(self, place: ShardLocation, index: Index, rows: RowLayout):
        super().__init__(place, index, rows)
        self._is_ready = np.zeros(-(-len(self) // rows.block_rows), dtype=np.bool_)
        self._num_unready = len(self._is_ready)
        multiple = math.lcm(rows.row_bytes, GRANULE)
        slot_rows = min(rows.shard_rows, len(self))
        slot_bytes = -(-slot_rows * rows.row_bytes // multiple) * multiple
        self._region = MappedRegion(len(index.shards), slot_bytes)
        # Rows of a slot that no shard has: by so many a shard's rows lie behind those before it.
        self._gap = slot_bytes // rows.row_bytes - slot_rows
        content = torch.from_numpy(self._region.content).view(-1, rows.row_bytes)
        self._content, self._gather = content, layout.Gather(rows, content)

    def _copied(self, ids: Ids) -> Tensor:
        with self._while_used(ids):
            self._make_ready(ids)
            return self._content.index_select(0, self._places(ids))

    def _batch(self, ids: Ids) -> Any:
        with self._while_used(ids):
            self._make_ready(ids)
            return self._gather.batch(self._places(ids))

    def _places(self, ids: Ids) -> Tensor:
        """Where samples lie among the rows of the region."""
        if self._gap:
            ids = ids + ids // self._rows.shard_rows * self._gap
        return torch.from_numpy(np.ascontiguousarray(ids))

    def _make_ready(self, ids: Ids) -> None:
        """Have the blocks of these samples mapped and checked."""
        if not self._num_unready:
            return
        blocks = ids // self._rows.block_rows
        is_ready = self._is_ready[blocks]
        while not is_ready.all():
            needed = frozenset((ids // self._rows.shard_rows).tolist())
            unready = ids[~is_ready]
            self._fetch(np.unique(unready // self._rows.shard_rows).tolist(), needed)
            for number, block, here in self._by_block(unready):
                self._check(number, block, int(unready[here[0]]), needed)
            is_ready = self._is_ready[blocks]  # again: a shard may have been closed for another

    def _check(self, number: int, block: int, sample: int, needed: Collection[int]) -> None:
        self._looked_at(sample, number, needed, lambda shard: shard.stored(block))
        at = number * self._blocks_a_shard + block
        with self._locked():
            self._num_unready -= not self._is_ready[at]
            self._is_ready[at] = True

    def _map(self, number: int, path: Path) -> OpenShard:
        data, table = split_shard(self.index, number, map_file(path))
        return OpenShard(
            self.index, number, self._region.map(number, path, len(data)), bytes(table)
        )

    def _close(self, number: int) -> None:
        super()._close(number)
        first = number * self._blocks_a_shard
        of_shard = self._is_ready[first : first + self._blocks_a_shard]
        self._num_unready += int(of_shard.sum())
        of_shard[:] = False
        self._region.unmap(number)


class InflatedRows(RowSource):
    """Rows out of compressed blocks, of which those used last are kept as they were before."""

    def __init__(self, place: ShardLocation, index: Index, rows: RowLayout):
        super().__init__(place, index, rows)
        self._inflated = InflatedBlocks()

    def _copied(self, ids: Ids) -> Tensor:
        rows = np.empty((len(ids), self._rows.row_bytes), dtype=np.uint8)
        numbers = np.unique(ids // self._rows.shard_rows).tolist()
        for number, block, here in self._by_block(ids):
            if numbers and number == numbers[0]:  # the first of the next few
                self._fetch(numbers[:AT_ONCE], numbers[:AT_ONCE])
                del numbers[:AT_ONCE]
            with self._while_used(ids[here]):
                raw = self._raw(number, block, int(ids[here[0]]))
            content = np.frombuffer(raw, np.uint8).reshape(-1, self._rows.row_bytes)
            rows[here] = content[ids[here] % self._rows.block_rows]
        return torch.from_numpy(rows)

    def _raw(self, number: int, block: int, sample: int) -> bytes:
        return self._looked_at(
            sample, number, (number,), lambda shard: self._inflated.block(shard, block)
        )

    def _batch(self, ids: Ids) -> Any:
        return layout.Gather(self._rows, self._copied(ids)).batch(torch.arange(len(ids)))


def shards(
    where: str | Path | Sequence[str | Path],
    cache_dir: str | Path | None = None,
    *,
    cache_bytes: int | None = None,
    strict: bool = True,
) -> RowSource | PackedSource | View:
    """A set of shards in a directory or at a URL, as a source; or several sets, one after another.

    Copies of remote shards go to `cache_dir`, up to `cache_bytes` (16 GiB) of them. A set of which
    a shard is missing or, in a directory, of the wrong length is refused, unless `strict` is False:
    then its samples are lost one by one, when they are asked for. Several sets have the order of
    one that holds the shards of all, so that data may grow by a set, and go on with --new-data.
    """
    if isinstance(where, list | tuple):
        if not where:
            raise UsageError("shards([]): no set was named. Name one or more.")
        sets = [open_set(each, cache_dir, cache_bytes, strict) for each in where]
        sizes = [shard.num_samples for each in sets for shard in each.index.shards]
        return View(join(sets), BlockShuffled(sizes))
    return open_set(where, cache_dir, cache_bytes, strict)


def open_set(
    where: Any,
    cache_dir: str | Path | None = None,
    cache_bytes: int | None = None,
    strict: bool = True,
) -> RowSource | PackedSource:
    """One set."""
    place = open_location(where, cache_dir, cache_bytes)
    index = read_index(place)
    if strict:
        refuse_incomplete(place, index)
    if isinstance(index.layout, RowLayout):
        kind = MappedRows if index.compression is None else InflatedRows
        return kind(place, index, index.layout)
    return PackedSource(place, index)


def refuse_incomplete(place: ShardLocation, index: Index) -> None:
    missing = sorted({shard_name(number) for number in range(len(index.shards))} - place.names())
    if missing:
        raise BadShards(f"{place}: {_named(missing)} missing. {_WAY_OUT}")
    if place.keeps:
        for number in range(len(index.shards)):
            try:
                place.local(index, number, ())
            except BadShards as bad:
                raise BadShards(f"{place}: {bad} {_WAY_OUT}") from None


def _named(missing: list[str]) -> str:
    if len(missing) == 1:
        return f"{missing[0]} is"
    more = len(missing) - _NUM_NAMED
    return ", ".join(missing[:_NUM_NAMED]) + (f" and {more} more are" if more > 0 else " are")
