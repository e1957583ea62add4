"""Telling a source which samples come next, so that it can have them near.

The order is a pure function, so what will be asked for is known. A source that must fetch things
before it can read them (remote shards) is told the ids of up to 32,768 samples that come next, says
for how many of them it provides, and is told again when half of these were asked for.

Not for loading samples themselves ahead; that is what `loaders.py` is for. Cost: some 40 ns for
each id, each time that they are told.
"""

from collections.abc import Callable

import numpy as np

from shoal.data.permutation import Ids
from shoal.data.sources import FetchesAhead, Source

NUM_IDS = 32_768
_TIMES_PROVIDED = 4  # that a source is told of, so that it may provide for more the next time

IdsFrom = Callable[[int, int], Ids]  # (step, number of steps)


class Foresight:
    """`at` each step that was loaded, in any order; `close` at the end."""

    def __init__(self, source: FetchesAhead, ids_from: IdsFrom, batch_size: int):
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


def foresight_of(source: Source, ids_from: IdsFrom, batch_size: int) -> Foresight | None:
    """None for a source that has nothing to fetch."""
    if not isinstance(source, FetchesAhead):
        return None
    return Foresight(source, ids_from, batch_size)
