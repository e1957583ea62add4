"""A store in memory for the tests, and what is in it."""

from typing import Any

import numpy as np
import pytest

from shoal.data.shard_files import locations
from shoal.storage.object_client import RetryPolicy
from tests.unit.data.shards.made import NUM, Small, same

HASTY = RetryPolicy(num_tries=4, first_pause_s=0.01, most_pause_s=0.05)
URL = "memory://sets/out"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "PATIENCE", HASTY)


def objects(memory: Any) -> dict[str, bytes]:
    return {path.rpartition("/")[2]: memory.cat_file(path) for path in memory.find("/sets/out")}


def check(source: Any, kind: str) -> None:
    wanted = Small(kind)
    for number in np.random.default_rng(0).permutation(NUM):
        assert same(source[int(number)], wanted[int(number)])
