"""A set of shards that is open: its order, its shards as they are needed, and what becomes of them.

Shards of a directory are mapped and stay so. Those behind a URL are copied to a local directory
first, some beside each other; other processes may remove such a copy to make room, so from time to
time those in use are marked as used, and what is mapped of a file that is gone is let go: else its
bytes would be taken for as long as this process lives. A shard that could not be had is not asked
for again for a minute. Those of samples that come next are copied meanwhile (`prefetch.py`).

Next: `reading.py` for the sources made of it, `locations.py` and `fetching.py` for the copies.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ContextManager, TypeVar

import numpy as np

from shoal.data.orders import BlockShuffled
from shoal.data.readers.records import SourceLost
from shoal.data.shard_files.blocks import OpenShard, open_shard
from shoal.data.shard_files.fetching import ShardCopies
from shoal.data.shard_files.format import BadShards, Index, first_samples
from shoal.data.shard_files.locations import LocalShard, ShardDirectory, ShardLocation
from shoal.data.shard_files.prefetch import ShardPrefetcher, UpcomingShard, choose_shards
from shoal.data.sources import Ids
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.system.processes import PerProcess

AT_ONCE = 4  # shards that are fetched beside each other
_NUM_TRIES = 10  # to open a local copy, which others may remove as often as it is fetched
_AGAIN_AFTER_S = 60.0  # a shard that did not come is asked for again after this
_LOOK_S = 10.0  # between two looks at the copies of open shards

Found = TypeVar("Found")


class LostSample(RecipeError):
    """A sample cannot be had: its shard is missing, cut short or damaged."""


class ShardSource:
    """What all sets have: a length, an order by shards, and a shard opened when it is needed."""

    def __init__(self, place: ShardLocation, index: Index):
        self.place, self.index = place, index
        self._firsts = np.asarray(first_samples(index), dtype=np.int64)
        self._open: dict[int, OpenShard] = {}
        # When and why a shard could not be opened; the words, for an error keeps its callers alive.
        self._failed: dict[int, tuple[float, type[UsageError], str]] = {}
        self._locked = PerProcess(threading.RLock).get
        self._used: set[int] = set()  # since the last look
        self._look_at = 0.0
        self._ahead = PerProcess(ShardPrefetcher).get
        copies = getattr(place, "copies", None)
        if copies is not None:  # else there is nothing to fetch
            self.fetch_ahead = partial(self._fetch_ahead, copies)

    def __len__(self) -> int:
        return self.index.num_samples

    def __repr__(self) -> str:
        return f"shards({str(self.place)!r})"

    def identity(self) -> str:
        """A name for its content, which no other set has."""
        return f"shards {self.index.digest}"

    @cached_property
    def order(self) -> BlockShuffled:
        """Shuffled among some shards at a time, so that reading stays local."""
        return BlockShuffled([shard.num_samples for shard in self.index.shards])

    def _shards_of(self, ids: Ids) -> Ids:
        """The shard of each sample."""
        return np.searchsorted(self._firsts, ids, side="right") - 1

    def _while_used(self, ids: Ids) -> ContextManager[Any]:
        """Held while samples are copied, where another thread may have their files removed."""
        return nullcontext() if self.place.keeps else self._used_now(ids)

    @contextmanager
    def _used_now(self, ids: Ids) -> Iterator[None]:
        with self._locked():
            self._used.update(self._shards_of(ids).tolist())
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_S
                self._close_all(
                    [n for n in self._open if not self.place.keep(self.index, n, n in self._used)]
                )
                self._used.clear()
            yield

    def _looked_at(
        self, sample: int, number: int, needed: Collection[int], look: Callable[[OpenShard], Found]
    ) -> Found:
        """What `look` finds in shard `number`, for a sample; a damaged copy is fetched again, once.

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
        """Have remote shards copied, some at a time; what fails is raised when it is read."""
        with self._locked():
            absent = [n for n in numbers if n not in self._open and n not in self._failed]
            if self.place.keeps or len(absent) < 2:
                return

            def fetch(number: int) -> LocalShard | UsageError:
                try:
                    return self.place.local(self.index, number, needed)
                except UsageError as error:
                    return error

            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="shoal-fetch") as threads:
                for number, found in zip(absent, threads.map(fetch, absent), strict=True):
                    if isinstance(found, UsageError):
                        self._note_failure(number, found)
                    else:
                        self._close_all(found.gone)

    def _fetch_ahead(self, copies: ShardCopies, ids: Ids) -> int:
        """Have the shards of samples that come next copied meanwhile; for how many that is done."""
        if not len(ids):
            self._ahead().stop()
            return 0
        numbers, firsts = np.unique(self._shards_of(ids), return_index=True)
        turn = np.argsort(firsts)
        coming = [self._coming(copies, number) for number in numbers[turn].tolist()]
        wanted, num_provided = choose_shards(coming, copies.most_bytes // 2)
        needed = [shard.number for shard in coming[:num_provided]]
        self._ahead().want(wanted, partial(self._copy_ahead, needed))
        return len(ids) if num_provided == len(coming) else int(firsts[turn[num_provided]])

    def _coming(self, copies: ShardCopies, number: int) -> UpcomingShard:
        is_here = number in self._open or copies.has(self.index, number)
        return UpcomingShard(number, self.index.num_bytes(self.index.shards[number]), is_here)

    def _copy_ahead(self, needed: Collection[int], number: int, cancelled: threading.Event) -> None:
        """In a thread of its own: readers do not wait meanwhile."""
        assert not isinstance(self.place, ShardDirectory)
        found = self.place.local(self.index, number, needed, cancelled)
        with self._locked():
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
        return open_shard(self.index, number, path)

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
