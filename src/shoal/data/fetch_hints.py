"""Announces the next samples to a source, so that it can fetch them ahead of time.

The order is a pure function, so the next ids are known. A source that must fetch before it can read
(remote shards) gets the ids of up to 32,768 next samples and returns how many of them it will
fetch. It gets ids again when half of these were loaded.

Not for loading the samples themselves ahead of time; that is `loader_processes.py`. Cost: some 40
ns for each id of an announcement. Next: `shard_files/prefetch.py`, which fetches.
"""

from collections.abc import Callable

import numpy as np

from shoal.data.permutation import Ids
from shoal.data.sources import PrefetchingSource, Source

NUM_IDS = 32_768
_TIMES_PROVIDED = 4  # ids to announce for each that it fetched, so that it can fetch more

IdsFrom = Callable[[int, int], Ids]  # (step, number of steps)


class FetchHints:
    """Call `at` with each step that was loaded, in any order, and `close` at the end."""

    def __init__(self, source: PrefetchingSource, ids_from: IdsFrom, batch_size: int):
        self._source, self._ids_from, self._batch_size = source, ids_from, batch_size
        self._told, self._num_ids = range(0), NUM_IDS

    def at(self, step: int) -> None:
        """Have what comes after this step fetched, unless it is under way."""
        if step in self._told:
            return
        ids = self._ids_from(step + 1, max(1, self._num_ids // self._batch_size))
        num_provided = self._source.fetch_ahead(ids)
        self._told = range(step, step + max(1, num_provided // 2 // self._batch_size))
        self._num_ids = min(NUM_IDS, _TIMES_PROVIDED * max(num_provided, self._batch_size))

    def close(self) -> None:
        self._told = range(0)
        self._source.fetch_ahead(np.empty(0, dtype=np.int64))


def prefetcher_for(source: Source, ids_from: IdsFrom, batch_size: int) -> FetchHints | None:
    """None for a source that has nothing to fetch."""
    if not isinstance(source, PrefetchingSource):
        return None
    return FetchHints(source, ids_from, batch_size)
