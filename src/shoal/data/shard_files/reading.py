"""Shards as a source: samples by number, batches in one gather, every byte checked before its use.

    shoal.data.shards("data/tokens")
    shoal.data.shards("s3://bucket/tokens", cache_dir="/scratch/shards")

Shards of a directory are mapped, those behind a URL are first copied to a local directory of
limited size. A block is hashed when it is first touched; its samples are then given out as copies,
so nobody can write into the map. What cannot be given, because a shard is damaged, missing or does
not come, is a `LostSample` with its number, the shard and the reason; under
`shoal.data.quarantine` a run goes on without it.

Cost: one copy of what is asked for. A first pass also hashes all blocks, at some 10 GB/s. A lone
first sample reads a block of 64 KiB. A file that is truncated while it is mapped ends the process
(SIGBUS): never write into a set, build a new one. Threads may share a source, and forks use it.
Next: `format.py`, `region.py`; docs/how-to/shards.md.
"""

import math
import time
from collections.abc import Collection
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ContextManager

import numpy as np
import torch
from torch import Tensor

from shoal.data.orders import Blocks
from shoal.data.packing import BadSample, unpack
from shoal.data.shard_files import layout
from shoal.data.shard_files.blocks import ForkSafeLock, Inflated, OpenShard, halves, mapped
from shoal.data.shard_files.fetching import CACHE_BYTES
from shoal.data.shard_files.format import BadShards, Index, Rows, first_samples, shard_name
from shoal.data.shard_files.places import Place, open_place, read_index
from shoal.data.shard_files.region import GRANULE, Region
from shoal.data.sources import Ids
from shoal.errors import RecipeError, ShoalError, UsageError

_NUM_TRIES = 3  # to open a local copy
_AGAIN_AFTER_S = 60.0  # a shard that did not come is asked for again after this


class LostSample(RecipeError):
    """A sample cannot be had: its shard is damaged, missing, or does not come."""


class ShardSource:
    """What all sets have: a length, an order by shards, and a shard opened when it is needed."""

    def __init__(self, place: Place, index: Index):
        self.place, self.index = place, index
        self._firsts = np.asarray(first_samples(index), dtype=np.int64)
        self._open: dict[int, OpenShard] = {}
        self._failed: dict[int, tuple[float, ShoalError]] = {}
        self._locked = ForkSafeLock()

    def __len__(self) -> int:
        return self.index.num_samples

    def __repr__(self) -> str:
        return f"shards({str(self.place)!r})"

    def identity(self) -> str:
        """A name for its content, which no other set has."""
        return f"shards {self.index.digest()}"

    @cached_property
    def order(self) -> Blocks:
        """Shuffled among some shards at a time, so that reading stays local."""
        return Blocks([shard.num_samples for shard in self.index.shards])

    def _at(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index % len(self)

    def _while_used(self) -> ContextManager[Any]:
        """Held while a shard's bytes are copied, where another thread may have its file removed."""
        return nullcontext() if self.place.keeps else self._locked()

    def _shard(self, number: int, needed: Collection[int]) -> OpenShard:
        """The open shard `number`; those of `needed` are not closed for it."""
        shard = self._open.get(number)
        if shard is not None:
            return shard
        with self._locked():
            if number not in self._open:
                self._refuse_failed(number)
                try:
                    self._open[number] = self._opened(number, needed)
                except ShoalError as error:
                    self._failed[number] = (time.monotonic(), error)
                    raise
            return self._open[number]

    def _opened(self, number: int, needed: Collection[int]) -> OpenShard:
        for tries in range(1, _NUM_TRIES + 1):
            found = self.place.local(self.index, number, needed)
            for gone in found.gone:
                self._close(gone)
            try:
                return self._map(number, found.path)
            except OSError as error:  # removed, perhaps, by another process that needed room
                if tries == _NUM_TRIES or not isinstance(error, FileNotFoundError):
                    why = f"{found.path} cannot be read: {error.strerror}."
                    raise BadShards(why) from None
            except BadShards:
                if tries == _NUM_TRIES or not self.place.drop(self.index, number):
                    raise
        raise AssertionError("the last try returns or raises")

    def _map(self, number: int, path: Path) -> OpenShard:
        return OpenShard(self.index, number, *halves(self.index, number, mapped(path)))

    def _close(self, number: int) -> None:
        self._open.pop(number, None)

    def _refuse_failed(self, number: int) -> None:
        when, error = self._failed.get(number, (-math.inf, None))
        if error is not None and time.monotonic() - when < _AGAIN_AFTER_S:
            raise error

    def _damaged(self, number: int, error: BadShards) -> None:
        """A block is bad. If its shard is a local copy, it is dropped to be fetched anew."""
        if not self.place.drop(self.index, number):
            raise error
        self._close(number)

    def _lost(self, sample: int, error: ShoalError) -> LostSample:
        return LostSample(f"sample {sample} of {self.place} cannot be read: {error}")


class PackedSource(ShardSource):
    """Samples that differ in shape or hold more than numbers."""

    def __init__(self, place: Place, index: Index):
        super().__init__(place, index)
        self._inflated = Inflated() if index.compression is not None else None

    def __getitem__(self, index: int) -> Any:
        sample = self._at(index)
        number = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        try:
            return unpack(self._packed(number, sample - int(self._firsts[number])))
        except (UsageError, BadSample) as error:
            raise self._lost(sample, error) from error

    def _packed(self, number: int, at: int) -> bytearray:
        """The bytes of a sample, for it alone."""
        with self._while_used():
            for may_repair in (True, False):
                shard = self._shard(number, (number,))
                assert shard.table.offsets is not None
                start, stop = shard.table.offsets[at : at + 2].tolist()
                block = int(np.searchsorted(shard.table.raw, start, side="right")) - 1
                first = int(shard.table.raw[block])
                try:
                    if self._inflated is None:
                        content: bytes | memoryview = shard.stored(block)
                    else:
                        content = self._inflated.block(shard, block)
                    return bytearray(content[start - first : stop - first])
                except BadShards as bad:
                    if not may_repair:
                        raise
                    self._damaged(number, bad)
        raise AssertionError("the second try returns or raises")


class RowSource(ShardSource):
    """Samples that are rows of one length, as they lie in the files or inflated from them."""

    def __init__(self, place: Place, index: Index, rows: Rows):
        super().__init__(place, index)
        self._rows = rows
        self._is_ready = np.zeros(-(-len(self) // rows.block_rows), dtype=np.bool_)
        self._num_unready = len(self._is_ready)
        if index.compression is not None:
            self._inflated = Inflated()
            return
        multiple = math.lcm(rows.row_bytes, GRANULE)
        slot_rows = min(rows.shard_rows, len(self))
        slot_bytes = -(-slot_rows * rows.row_bytes // multiple) * multiple
        self._region = Region(len(index.shards), slot_bytes)
        # Rows of a slot that no shard has: by so many a shard's rows lie behind those before it.
        self._gap = slot_bytes // rows.row_bytes - slot_rows
        content = torch.from_numpy(self._region.content).view(-1, rows.row_bytes)
        self._content, self._gather = content, layout.Gather(rows, content)

    def __getitem__(self, index: int) -> Any:
        ids = np.asarray([self._at(index)], dtype=np.int64)
        return layout.sample_of(self._rows, self._copied(ids)[0])

    def _copied(self, ids: Ids) -> Tensor:
        """Whole rows, [ids, row_bytes]."""
        if self.index.compression is None:
            with self._while_used():
                self._make_ready(ids)
                return self._content.index_select(0, self._places(ids))
        rows = np.empty((len(ids), self._rows.row_bytes), dtype=np.uint8)
        for number, block, here in _by_block(ids, self._rows):
            with self._while_used():
                content = np.frombuffer(self._raw(number, block, int(ids[here[0]])), np.uint8)
            at = ids[here] % self._rows.shard_rows - block * self._rows.block_rows
            rows[here] = content.reshape(-1, self._rows.row_bytes)[at]
        return torch.from_numpy(rows)

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
            for number, block, here in _by_block(ids[~is_ready], self._rows):
                self._check(number, block, int(ids[~is_ready][here[0]]), needed)
            is_ready = self._is_ready[blocks]  # again: a shard may have been closed for another

    def _check(self, number: int, block: int, sample: int, needed: Collection[int]) -> None:
        try:
            for may_repair in (True, False):
                shard = self._shard(number, needed)
                try:
                    shard.stored(block)
                    break
                except BadShards as bad:
                    if not may_repair:
                        raise
                    self._damaged(number, bad)
        except UsageError as error:
            raise self._lost(sample, error) from error
        per_shard = self._rows.shard_rows // self._rows.block_rows
        with self._locked():
            self._num_unready -= not self._is_ready[number * per_shard + block]
            self._is_ready[number * per_shard + block] = True

    def _raw(self, number: int, block: int, sample: int) -> bytes:
        try:
            for may_repair in (True, False):
                try:
                    return self._inflated.block(self._shard(number, (number,)), block)
                except BadShards as bad:
                    if not may_repair:
                        raise
                    self._damaged(number, bad)
        except UsageError as error:
            raise self._lost(sample, error) from error
        raise AssertionError("the second try returns or raises")

    def _map(self, number: int, path: Path) -> OpenShard:
        if self.index.compression is not None:
            return super()._map(number, path)
        data, table = halves(self.index, number, mapped(path))
        return OpenShard(
            self.index, number, self._region.map(number, path, len(data)), bytes(table)
        )

    def _close(self, number: int) -> None:
        super()._close(number)
        if self.index.compression is None:
            per_shard = self._rows.shard_rows // self._rows.block_rows
            of_shard = self._is_ready[number * per_shard : (number + 1) * per_shard]
            self._num_unready += int(of_shard.sum())
            of_shard[:] = False
            self._region.unmap(number)


class PairSource(RowSource):
    """Rows that are pairs (inputs, target), of which many are taken at once."""

    def take(self, ids: Ids) -> tuple[Any, Any]:
        """The collated samples `ids`."""
        # As unsigned numbers, those below 0 are the largest.
        if len(ids) and int(ids.view(np.uint64).max()) >= len(self):
            raise IndexError(f"samples {ids.min()} to {ids.max()} of {len(self)}")
        if self.index.compression is not None:
            content = self._copied(ids)
            inputs, target = layout.Gather(self._rows, content).batch(torch.arange(len(ids)))
        else:
            with self._while_used():
                self._make_ready(ids)
                inputs, target = self._gather.batch(self._places(ids))
        return inputs, target


def shards(
    where: str | Path,
    cache_dir: str | Path | None = None,
    *,
    cache_bytes: int = CACHE_BYTES,
    strict: bool = True,
) -> RowSource | PackedSource:
    """A set of shards in a directory or at a URL, as a source.

    Copies of remote shards go to `cache_dir`, up to `cache_bytes` of them. A set of which a shard
    is missing or, in a directory, of the wrong length is refused, unless `strict` is False: then
    its samples are lost one by one, when they are asked for.
    """
    place = open_place(where, cache_dir, cache_bytes)
    index = read_index(place)
    if strict:
        refuse_incomplete(place, index)
    if isinstance(index.layout, Rows):
        kind = PairSource if layout.is_pair(index.layout) else RowSource
        return kind(place, index, index.layout)
    return PackedSource(place, index)


def refuse_incomplete(place: Place, index: Index) -> None:
    missing = {shard_name(number) for number in range(len(index.shards))} - place.names()
    if missing:
        raise BadShards(f"{place}: {min(missing)} is missing, and {len(missing) - 1} more.")
    if place.keeps:
        for number in range(len(index.shards)):
            try:
                place.local(index, number, ())
            except BadShards as bad:
                raise BadShards(f"{place}: {bad}") from None


def _by_block(ids: Ids, rows: Rows) -> list[tuple[int, int, Ids]]:
    """The shard and block of samples, once each, and where in `ids` its samples stand."""
    blocks, inverse = np.unique(ids // rows.block_rows, return_inverse=True)
    turn = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[turn], np.arange(1, len(blocks)))
    per_shard = max(1, rows.shard_rows // rows.block_rows)
    return [
        (int(block) // per_shard, int(block) % per_shard, here)
        for block, here in zip(blocks, np.split(turn, edges), strict=True)
    ]
