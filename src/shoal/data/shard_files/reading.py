"""Shards as a source: samples by number, batches in one gather, every byte checked before its use.

    shoal.data.shards("data/tokens")
    shoal.data.shards("s3://bucket/tokens", cache_dir="/scratch/shards")

Shards of a directory are mapped, those behind a URL are first copied to a local directory of
limited size, up to four of a batch beside each other. A block is hashed when it is first touched;
its samples are then given out as copies, so nobody can write into the map. A sample whose shard is
missing, cut short or damaged is a `LostSample` with its number, the shard and the reason; under
`shoal.data.quarantine` a run goes on without it. A store that does not answer, or a cache whose
disk is full, is `SourceLost` and ends the run: it says nothing of the sample.

Cost: one copy of what is asked for. A first pass also hashes all blocks, at some 10 GB/s. A lone
first sample reads a block of 64 KiB. A file that is truncated while it is mapped ends the process
(SIGBUS): never write into a set, build a new one. Threads may share a source, and forks use it.
Next: `format.py`, `region.py`; docs/how-to/shards.md.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ContextManager, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.data.orders import Blocks
from shoal.data.packing import BadSample, unpack
from shoal.data.readers.records import SourceLost
from shoal.data.shard_files import layout
from shoal.data.shard_files.blocks import Inflated, OpenShard, halves, mapped, opened
from shoal.data.shard_files.format import BadShards, Index, Rows, first_samples, shard_name
from shoal.data.shard_files.places import Local, Place, open_place, read_index
from shoal.data.shard_files.region import GRANULE, Region
from shoal.data.sources import Ids, position
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.processes import PerProcess

_AT_ONCE = 4  # shards that are fetched beside each other
_NUM_TRIES = 3  # to open a local copy
_AGAIN_AFTER_S = 60.0  # a shard that did not come is asked for again after this
_NUM_NAMED = 3  # of the shards that are missing
_WAY_OUT = (
    "Copy the set there anew or build it again; with strict=False it opens, and the samples that "
    "are not there are lost."
)

Found = TypeVar("Found")


class LostSample(RecipeError):
    """A sample cannot be had: its shard is missing, cut short or damaged."""


class ShardSource:
    """What all sets have: a length, an order by shards, and a shard opened when it is needed."""

    def __init__(self, place: Place, index: Index):
        self.place, self.index = place, index
        self._firsts = np.asarray(first_samples(index), dtype=np.int64)
        self._open: dict[int, OpenShard] = {}
        # When and why a shard could not be opened; the words, for an error keeps its callers alive.
        self._failed: dict[int, tuple[float, type[UsageError], str]] = {}
        self._locked = PerProcess(threading.RLock).get

    def __len__(self) -> int:
        return self.index.num_samples

    def __repr__(self) -> str:
        return f"shards({str(self.place)!r})"

    def identity(self) -> str:
        """A name for its content, which no other set has."""
        return f"shards {self.index.digest}"

    @cached_property
    def order(self) -> Blocks:
        """Shuffled among some shards at a time, so that reading stays local."""
        return Blocks([shard.num_samples for shard in self.index.shards])

    def _while_used(self) -> ContextManager[Any]:
        """Held while a shard's bytes are copied, where another thread may have its file removed."""
        return nullcontext() if self.place.keeps else self._locked()

    def _looked_at(
        self,
        sample: int,
        number: int,
        needed: Collection[int],
        look: Callable[[OpenShard], Found],
    ) -> Found:
        """What `look` finds in shard `number`, for a sample; a damaged copy is fetched anew, once.

        Shards of `needed` are not closed for it.
        """
        try:
            for may_repair in (True, False):
                shard = self._shard(number, needed)
                try:
                    return look(shard)
                except BadShards:
                    if not may_repair or not self.place.drop(self.index, number):
                        raise
                    self._close(number)
        except BadShards as bad:
            raise self._lost(sample, bad) from bad
        except UsageError as error:
            what = f"sample {sample} of {self.place} was not reached: {error}"
            raise SourceLost(what) from error
        raise AssertionError("the second try returns or raises")

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
                except UsageError as error:
                    self._note_failure(number, error)
                    raise
            return self._open[number]

    def _fetch(self, numbers: Collection[int], needed: Collection[int]) -> None:
        """Have remote shards copied, some at a time; what fails is told when it is looked at."""
        with self._locked():
            absent = [n for n in numbers if n not in self._open and n not in self._failed]
            if self.place.keeps or len(absent) < 2:
                return

            def fetch(number: int) -> Local | UsageError:
                try:
                    return self.place.local(self.index, number, needed)
                except UsageError as error:
                    return error

            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shoal-fetch") as threads:
                for number, found in zip(absent, threads.map(fetch, absent), strict=True):
                    if isinstance(found, UsageError):
                        self._note_failure(number, found)
                    else:
                        self._close_all(found.gone)

    def _note_failure(self, number: int, error: UsageError) -> None:
        kind = BadShards if isinstance(error, BadShards) else UsageError
        self._failed[number] = (time.monotonic(), kind, str(error))

    def _opened(self, number: int, needed: Collection[int]) -> OpenShard:
        for tries in range(1, _NUM_TRIES + 1):
            found = self.place.local(self.index, number, needed)
            self._close_all(found.gone)
            try:
                return self._map(number, found.path)
            except OSError as error:  # removed, perhaps, by another process that needed room
                if tries == _NUM_TRIES or not isinstance(error, FileNotFoundError):
                    what = f"{found.path} cannot be read: {error.strerror}."
                    raise UsageError(f"{what} Mend that, and start again.") from None
            except BadShards:
                if tries == _NUM_TRIES or not self.place.drop(self.index, number):
                    raise
        raise AssertionError("the last try returns or raises")

    def _map(self, number: int, path: Path) -> OpenShard:
        return opened(self.index, number, path)

    def _close(self, number: int) -> None:
        self._open.pop(number, None)

    def _close_all(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._close(number)

    def _refuse_failed(self, number: int) -> None:
        if number in self._failed:
            when, kind, why = self._failed[number]
            if time.monotonic() - when < _AGAIN_AFTER_S:
                raise kind(why)

    def _lost(self, sample: int, error: ShoalError) -> LostSample:
        return LostSample(f"sample {sample} of {self.place} cannot be read: {error}")


class PackedSource(ShardSource):
    """Samples that differ in shape or hold more than numbers."""

    def __init__(self, place: Place, index: Index):
        super().__init__(place, index)
        self._inflated = Inflated() if index.compression is not None else None

    def __getitem__(self, index: int) -> Any:
        sample = position(index, len(self))
        number = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        at = sample - int(self._firsts[number])
        with self._while_used():
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

    def __init__(self, place: Place, index: Index, rows: Rows):
        super().__init__(place, index)
        self._rows, self._blocks_a_shard = rows, rows.shard_rows // rows.block_rows
        if layout.is_pair(rows):
            self.take = self._take

    def __getitem__(self, index: int) -> Any:
        ids = np.asarray([position(index, len(self))], dtype=np.int64)
        return layout.sample_of(self._rows, self._copied(ids)[0])

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

    def __init__(self, place: Place, index: Index, rows: Rows):
        super().__init__(place, index, rows)
        self._is_ready = np.zeros(-(-len(self) // rows.block_rows), dtype=np.bool_)
        self._num_unready = len(self._is_ready)
        multiple = math.lcm(rows.row_bytes, GRANULE)
        slot_rows = min(rows.shard_rows, len(self))
        slot_bytes = -(-slot_rows * rows.row_bytes // multiple) * multiple
        self._region = Region(len(index.shards), slot_bytes)
        # Rows of a slot that no shard has: by so many a shard's rows lie behind those before it.
        self._gap = slot_bytes // rows.row_bytes - slot_rows
        content = torch.from_numpy(self._region.content).view(-1, rows.row_bytes)
        self._content, self._gather = content, layout.Gather(rows, content)

    def _copied(self, ids: Ids) -> Tensor:
        with self._while_used():
            self._make_ready(ids)
            return self._content.index_select(0, self._places(ids))

    def _batch(self, ids: Ids) -> Any:
        with self._while_used():
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
        data, table = halves(self.index, number, mapped(path))
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

    def __init__(self, place: Place, index: Index, rows: Rows):
        super().__init__(place, index, rows)
        self._inflated = Inflated()

    def _copied(self, ids: Ids) -> Tensor:
        rows = np.empty((len(ids), self._rows.row_bytes), dtype=np.uint8)
        numbers = np.unique(ids // self._rows.shard_rows).tolist()
        for number, block, here in self._by_block(ids):
            if numbers and number == numbers[0]:  # the first of the next few
                self._fetch(numbers[:_AT_ONCE], numbers[:_AT_ONCE])
                del numbers[:_AT_ONCE]
            with self._while_used():
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
    where: str | Path,
    cache_dir: str | Path | None = None,
    *,
    cache_bytes: int | None = None,
    strict: bool = True,
) -> RowSource | PackedSource:
    """A set of shards in a directory or at a URL, as a source.

    Copies of remote shards go to `cache_dir`, up to `cache_bytes` (16 GiB) of them. A set of which
    a shard is missing or, in a directory, of the wrong length is refused, unless `strict` is False:
    then its samples are lost one by one, when they are asked for.
    """
    place = open_place(where, cache_dir, cache_bytes)
    index = read_index(place)
    if strict:
        refuse_incomplete(place, index)
    if isinstance(index.layout, Rows):
        kind = MappedRows if index.compression is None else InflatedRows
        return kind(place, index, index.layout)
    return PackedSource(place, index)


def refuse_incomplete(place: Place, index: Index) -> None:
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
