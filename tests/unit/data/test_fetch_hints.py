"""Sources hear of what comes next before it is asked for, whatever they can provide for."""

import numpy as np
import pytest

from shoal.data import fetch_hints
from shoal.data.fetch_hints import FetchHints, prefetcher_for
from shoal.data.sources import Ids

BATCH, NUM_STEPS = 32, 2_000


class Near:
    """Provides for so many of the ids that it is told."""

    def __init__(self, num_provided: int):
        self.num_provided, self.near, self.num_told = num_provided, set[int](), 0

    def __len__(self) -> int:
        return BATCH * NUM_STEPS

    def __getitem__(self, index: int) -> int:
        return index

    def fetch_ahead(self, ids: Ids) -> int:
        self.num_told += len(ids)
        self.near |= set(ids[: self.num_provided].tolist())
        return min(len(ids), self.num_provided)


def ids_from(step: int, num_steps: int) -> Ids:
    return np.arange(step * BATCH, min(step + num_steps, NUM_STEPS) * BATCH)


@pytest.mark.parametrize("num_provided", [64, 100, 1_024, 1_000_000])
def test_what_is_asked_for_was_told_before(num_provided: int) -> None:
    source = Near(num_provided)
    ahead = prefetcher_for(source, ids_from, BATCH)
    assert isinstance(ahead, FetchHints)
    for step in range(NUM_STEPS):
        if step:
            wanted = set(range(step * BATCH, (step + 1) * BATCH))
            assert wanted <= source.near, f"step {step} was not fetched ahead"
        ahead.at(step)
    assert source.num_told < 2 * fetch_hints.NUM_IDS + 20 * len(source), "it was told too often"


def test_a_source_that_fetches_nothing_is_not_told() -> None:
    assert prefetcher_for(range(10), ids_from, BATCH) is None
