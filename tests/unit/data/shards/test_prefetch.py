"""Remote shards are fetched before their samples are asked for, within bounds; and given up."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.batches import Batches, LoadOptions
from shoal.data.shard_files import prefetch
from shoal.data.shard_files.prefetch import UpcomingShard, choose_shards
from shoal.data.shard_files.reading import shards
from shoal.data.sources import PrefetchingSource
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.quarantine import quarantine
from shoal.data.views import in_order, join, subset
from shoal.storage.object_client import ObjectClient
from tests.support.leaks import wait_until
from tests.unit.data.shards.made import NUM, make
from tests.unit.data.shards.stores import URL, hasty

__all__ = ["hasty"]

GET_RANGE = ObjectClient.get_range
HERE = [UpcomingShard(number, 10, is_here=True) for number in range(3)]


def copies(tmp_path: Path) -> int:
    return len(list((tmp_path / "copies").glob("*.bin")))


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each shard that is asked for."""
    names: list[str] = []

    def noted(self: ObjectClient, path: str, start: int, stop: int) -> bytes:
        names.append(path)
        return GET_RANGE(self, path, start, stop)

    monkeypatch.setattr(ObjectClient, "get_range", noted)
    return names


@pytest.mark.parametrize("kind", ["rows", "packed"])
@pytest.mark.parametrize("loaders", [0, 1])
def test_shards_come_before_their_samples(
    tmp_path: Path, memory: Any, asked_for: list[str], kind: str, loaders: int
) -> None:
    make(kind, URL, shard_bytes=300 if kind == "rows" else 700)
    source = shards(URL, tmp_path / "copies")
    pairs = in_order(mapped(source, lambda sample: (np.zeros(1), 0)))
    batches = Batches(pairs, batch_size=2, loading=LoadOptions(loaders=loaders))
    num_shards = len(source.index.shards)
    assert num_shards > 6 and not copies(tmp_path)
    batches.at(0).piece(0)
    assert wait_until(lambda: copies(tmp_path) == num_shards, 5)
    del asked_for[:]
    for step in range(NUM // 2):
        assert batches.at(step).piece(0).ids.tolist() == [2 * step, 2 * step + 1]
    batches.close()
    assert not asked_for


def test_every_layer_passes_it_on(tmp_path: Path, memory: Any) -> None:
    make("rows", URL, shard_bytes=300)
    source = shards(URL, tmp_path / "copies")
    last = NUM - 1
    layers: dict[str, Any] = {
        "some": (subset(source, [last, 0]), [0]),
        "quarantine": (quarantine(source, tmp_path / "bad.jsonl"), [last]),
        "join": (join([range(5), source]), [2, 5 + last]),
        "list of sets": (shards([URL, URL], tmp_path / "copies"), [NUM + last]),
    }
    for name, (layer, ids) in layers.items():
        assert isinstance(layer, PrefetchingSource), name
        assert layer.fetch_ahead(np.array(ids)) == len(ids)
        copy = tmp_path / "copies" / f"{source.index.shards[-1].hash}.bin"
        assert wait_until(copy.exists, 5), name
        assert layer.fetch_ahead(np.empty(0, dtype=np.int64)) == 0
        assert copies(tmp_path) == 1
        copy.unlink()
    assert not isinstance(join([range(5), range(6)]), PrefetchingSource)


def test_a_joined_source_provides_as_far_as_its_parts(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MOST_SHARDS", 1)
    make("rows", URL, shard_bytes=300)
    joined = join([range(5), shards(URL, tmp_path / "copies")])
    ids = np.array([0, 5, 1, 6, 4 + NUM, 2, 5])
    assert joined.fetch_ahead(ids) == 4
    joined.fetch_ahead(ids[:0])


def test_what_is_fetched_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    away = [UpcomingShard(number, 10, is_here=False) for number in range(3, 7)]
    assert choose_shards([*HERE, *away], 70) == ([3, 4, 5, 6], 7)
    assert choose_shards([*HERE, *away], 69) == ([3, 4, 5], 6)  # all that comes fits
    assert choose_shards([*away, *HERE], 30) == ([3, 4, 5], 3)
    monkeypatch.setattr(prefetch, "MOST_SHARDS", 2)
    assert choose_shards([*HERE, *away], 1000) == ([3, 4], 5)
    assert choose_shards(HERE, 1000) == ([], 3)
    monkeypatch.setattr(prefetch, "MOST_BYTES", 10)
    assert choose_shards([*HERE, *away], 1000) == ([3], 4)
    monkeypatch.setattr(prefetch, "MOST_BYTES", 1)
    assert choose_shards([*HERE, *away], 1000) == ([3], 4)  # one that is too large comes alone


def test_a_small_directory_holds_what_is_in_use(
    tmp_path: Path, memory: Any, asked_for: list[str]
) -> None:
    """Half of it is for what comes: nothing is fetched twice in a pass."""
    make("rows", URL, shard_bytes=300)
    size = max(memory.size(path) for path in memory.find("/sets/out") if path.endswith(".bin"))
    source = shards(URL, tmp_path / "copies", cache_bytes=6 * size)
    one_by_one = LoadOptions(collate=lambda samples: (torch.zeros(2), torch.zeros(2)))
    batches = Batches(in_order(source), batch_size=2, loading=one_by_one)
    for step in range(NUM // 2 - 10):  # until the next pass comes into sight
        batches.at(step).piece(0)
        assert copies(tmp_path) <= 6
    batches.close()
    assert sorted(asked_for) == sorted(set(asked_for))


def test_what_is_under_way_is_given_up_at_the_end(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL, shard_bytes=300)
    batches = Batches(in_order(shards(URL, tmp_path / "copies")), batch_size=2)
    go_on, hung = threading.Event(), threading.Event()

    def hangs(self: ObjectClient, path: str, start: int, stop: int) -> bytes:
        if "00000" not in path:
            hung.set()
            go_on.wait(20)
        return GET_RANGE(self, path, start, stop)

    monkeypatch.setattr(ObjectClient, "get_range", hangs)
    batches.at(0).piece(0)
    assert hung.wait(5)
    assert list((tmp_path / "copies").glob(".fetching-*"))
    batches.close()
    assert not list((tmp_path / "copies").glob(".fetching-*")) and copies(tmp_path) == 1
    names = [thread.name for thread in threading.enumerate()]
    assert "shoal-fetch-ahead" not in names
    go_on.set()
    assert batches.at(5).piece(0).ids.tolist() == [10, 11]  # and it can be gone on with
    batches.close()


def test_a_shard_that_does_not_come_ahead_is_asked_for_when_it_is_needed(
    tmp_path: Path, memory: Any
) -> None:
    make("rows", URL, shard_bytes=300)
    source = shards(URL, tmp_path / "copies")
    batches = Batches(in_order(source), batch_size=2)
    path = "/sets/out/shard-00003.bin"
    content = memory.cat_file(path)
    memory.rm_file(path)
    batches.at(0).piece(0)
    assert wait_until(lambda: copies(tmp_path) == len(source.index.shards) - 1, 5)
    memory.pipe_file(path, content)
    for step in range(NUM // 2):
        batches.at(step).piece(0)
    batches.close()
