"""A cached source: the same samples, made once, whoever asks for them and in which order."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.data.batches import Batches
from shoal.data.cache import cached as cached_module
from shoal.data.cache.cached import Cached, cached
from shoal.data.collating import load_collated
from shoal.data.readers.records import BadRecord
from shoal.data.sources import Pass, Source, tensors
from shoal.errors import RecipeError, UsageError
from shoal.testing.caches import in_child


class Photos:
    """Samples that are noted when they are made, in a file that all processes share."""

    def __init__(self, notes: Path, length: int = 40):
        self._notes, self._length = notes, length
        notes.touch()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        with self._notes.open("a") as notes:
            notes.write(f"{index}\n")
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index

    def made(self) -> list[int]:
        return sorted(map(int, self._notes.read_text().split()))


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    return Photos(tmp_path / "notes")


@pytest.fixture
def keep() -> Iterator[Callable[..., Cached]]:
    """`cached`, closed at the end."""
    made: list[Cached] = []

    def make(source: Any, **options: Any) -> Cached:
        made.append(cached(source, **{"key": "photos", "memory": "2MB", **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_samples_are_the_same_and_made_once(keep, photos: Photos) -> None:
    kept = keep(photos)
    assert len(kept) == 40
    for _ in range(3):
        for index in (0, 7, 39, -1):
            pixels, label = kept[index]
            assert label == index % 40
            assert pixels.dtype == torch.uint8 and (pixels == label).all()
    assert photos.made() == [0, 7, 39]
    assert kept.num_made == 3


def test_an_index_outside_ends_an_iteration(keep, photos: Photos) -> None:
    kept = keep(photos)
    for index in (40, -41):
        with pytest.raises(IndexError):
            kept[index]
    assert [label for _, label in kept] == list(range(40))


def test_take_is_stacking(keep, photos: Photos) -> None:
    kept = keep(photos)
    ids = np.array([3, 0, 39, 3], dtype=np.int64)
    for _ in range(2):
        pixels, labels = kept.take(ids)
        assert pixels.shape == (4, 3, 8, 8)
        assert labels.tolist() == pixels[:, 0, 0, 0].tolist() == ids.tolist()
    assert photos.made() == [0, 3, 39]


def test_take_says_what_does_not_fit_as_the_loader_would(keep) -> None:
    kept = keep([(torch.zeros(2), 0), (torch.zeros(3), 1), ("text", 2)])
    with pytest.raises(RecipeError, match="samples 0 and 1 do not fit into one batch"):
        kept.take(np.array([0, 1]))
    assert kept.take(np.array([2, 2]))[0] == ("text", "text")
    with pytest.raises(RecipeError, match="must be a pair"):
        keep([{"a": 1}], key="records").take(np.array([0]))


def test_a_sample_may_be_written_into(keep, photos: Photos) -> None:
    kept = keep(photos)
    for _ in range(3):
        pixels, _ = kept[5]
        assert (pixels == 5).all()
        pixels.zero_()


def test_the_first_pass_is_like_the_others(keep) -> None:
    class Pair(tuple[Any, ...]):
        pass

    sample = {"a": [np.float32(1.5), (None, "x")], "b": np.arange(3), "c": Pair((1, b"z"))}
    kept = keep([sample])
    first, second = kept[0], kept[0]
    assert repr(first) == repr(second)
    assert type(first["c"]) is tuple
    assert first["b"].flags.writeable


def test_batches_of_a_cached_source_are_those_of_the_source(keep, photos: Photos) -> None:
    plain, kept = (Batches(s, batch_size=8, num_pieces=2) for s in (photos, keep(photos)))
    for step in range(10):
        for piece in range(2):
            mine, theirs = kept.at(step).piece(piece), plain.at(step).piece(piece)
            assert torch.equal(mine.inputs, theirs.inputs)
            assert torch.equal(mine.target, theirs.target)


def test_processes_share_the_work(keep, photos: Photos) -> None:
    """They walk the same order at the same time, and each sample is made by one of them."""
    kept = keep(photos)
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for start in range(0, 40, 8):
                    _, labels = kept.take(np.arange(start, start + 8))
                    assert labels.tolist() == list(range(start, start + 8))
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert photos.made() == list(range(40))


def test_threads_share_the_work(keep, photos: Photos) -> None:
    kept = keep(photos)
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(kept.take(np.arange(40))[1].tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(40))] * 4
    assert photos.made() == list(range(40))


def test_one_who_never_finishes_is_not_waited_for_for_ever(
    keep, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_module, "_PATIENCE_S", 0.05)
    kept = keep(photos)
    number = 1 + int.from_bytes(kept._key(3)[:8], "little") % ((1 << 62) - 1)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        kept._ranges.try_lock(number)
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert kept[3][1] == 3
    assert kept.take(np.array([2, 3, 4]))[1].tolist() == [2, 3, 4]
    os.write(done[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *done):
        os.close(end)


def test_a_claim_goes_with_its_process(
    keep, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_module, "_PATIENCE_S", 1e6)
    kept = keep(photos)

    def die() -> bool:
        kept._ranges.try_lock(1 + int.from_bytes(kept._key(3)[:8], "little") % ((1 << 62) - 1))
        os._exit(0)

    assert in_child(die)
    assert kept[3][1] == 3


def test_without_room_nobody_waits(keep, tmp_path: Path) -> None:
    """All that is left of a cache that is full is the making of samples."""
    large = [(torch.full((50_000,), float(n)), n) for n in range(20)]
    kept = keep(large, memory="1MB")
    for _ in range(2):
        assert [int(kept[n][0][0]) for n in range(20)] == list(range(20))
    assert not kept._is_keeping
    assert kept.num_made == 40


def test_layers_are_used_in_order(keep, photos: Photos, tmp_path: Path) -> None:
    kept = keep(photos, disk=tmp_path / "disk", disk_bytes="2MB")
    assert kept.take(np.arange(40))[1].tolist() == list(range(40))
    kept.close()
    again = keep(photos, disk=tmp_path / "disk", disk_bytes="2MB")  # another run, later
    assert again.take(np.arange(40))[1].tolist() == list(range(40))
    assert again.num_made == 0
    alone = keep(photos, memory=None, disk=tmp_path / "disk")
    assert alone[7][1] == 7 and alone.num_made == 0


def test_other_data_under_the_same_layers_is_kept_apart(keep, photos: Photos) -> None:
    first, second = keep([(1, 2)], key=None), keep([(3, 4)], key=None)
    third, fourth = keep(photos, key="a"), keep(photos, key="b")
    assert [first[0], second[0], first[0]] == [(1, 2), (3, 4), (1, 2)]
    assert third[1][1] == fourth[1][1] == 1
    assert photos.made() == [1, 1]
    assert first.identity() != second.identity()


class Bad:
    """The third sample raises, the fourth cannot be kept."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == 2:
            raise OSError("photo-2.jpg is cut off")
        return (object() if index == 3 else index), index


def test_a_sample_that_raises_is_named(keep) -> None:
    kept = keep(Bad())
    with pytest.raises(OSError, match="photo-2"):
        kept[2]
    with pytest.raises(RecipeError, match=r"sample 2 could not be loaded.*photo-2"):
        load_collated(kept, np.array([0, 1, 2]), None)
    with pytest.raises(RecipeError, match="sample 3 cannot be cached: a sample holds a object"):
        kept[3]
    assert kept.take(np.array([0, 1]))[1].tolist() == [0, 1]


def test_the_claim_of_one_that_raised_is_let_go(keep) -> None:
    kept = keep(Bad())
    for _ in range(2):
        with pytest.raises(OSError):
            kept[2]
    assert not kept._ranges._held


def test_what_another_packed_otherwise_is_made_anew(keep, photos: Photos) -> None:
    kept = keep(photos)
    kept._row.put(kept._key(5), b"\xff\xff\xff\xff sealed, and no sample")
    assert kept[5][1] == 5


class Augmented(Photos):
    def vary(self, index: int, of: Pass) -> Any:
        return self[index]


def test_a_source_that_varies_is_refused(photos: Photos, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mapped\(cached\(source\), augment\)"):
        cached(Augmented(tmp_path / "more"), key="a")


def test_order_and_record_are_passed_on(keep, photos: Photos) -> None:
    order, record = object(), lambda index, error: None
    photos.order, photos.record = order, record  # type: ignore[attr-defined]
    kept = keep(photos)
    assert (kept.order, kept.record) == (order, record)
    assert not hasattr(keep([(1, 2)]), "order")


def test_nothing_to_keep_samples_in_is_refused(photos: Photos) -> None:
    with pytest.raises(UsageError, match="at least one of"):
        cached(photos, key="a", memory=None)


def test_what_is_no_source_is_refused() -> None:
    for data in (torch.zeros(3), {"a": 1}, 5):
        with pytest.raises(UsageError):
            cached(data, key="a")


def test_a_tensor_source_needs_no_key(keep) -> None:
    source: Source = tensors(torch.arange(10.0), torch.arange(10))
    kept = keep(source, key=None)
    inputs, target = kept.take(np.array([9, 1]))
    assert inputs.tolist() == [9.0, 1.0] and target.tolist() == [9, 1]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 39), min_size=1, max_size=60))
def test_any_order_of_asking_gives_the_same_samples(asked: list[int]) -> None:
    rows = [(torch.tensor([n, n * n]), n) for n in range(40)]
    kept = cached(rows, key="rows", memory="1MB")
    inputs, target = kept.take(np.array(asked, dtype=np.int64))
    assert target.tolist() == asked
    assert inputs.tolist() == [[n, n * n] for n in asked]
    assert kept[asked[0]][1] == asked[0]


def test_room_on_no_disk_is_refused(photos: Photos) -> None:
    with pytest.raises(UsageError, match=r"disk_bytes='2MB'\) has no effect without a disk"):
        cached(photos, key="k", disk_bytes="2MB")


class Rows(Photos):
    """Records that come many at a time, as those of a database."""

    asked = 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked += 1
        return self.many([index])[0]

    def many(self, ids: Any) -> list[tuple[Tensor, int]]:
        self.asked += 1
        if 33 in list(ids):
            raise BadRecord("row 33 is gone")
        return [super(Rows, self).__getitem__(int(index)) for index in ids]


def test_records_are_asked_for_together(keep, tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    kept = keep(rows)
    assert kept.take(np.array([*range(32), 5]))[1].tolist() == [*range(32), 5]
    assert rows.asked == 2 and rows.made() == list(range(32))
    assert kept.take(np.arange(32))[1].tolist() == list(range(32)) and rows.asked == 2
    with pytest.raises(BadRecord, match="row 33"):
        kept.take(np.arange(30, 40))
    assert kept[32][1] == 32 and rows.made() == list(range(33))  # what came before it is kept
    assert kept.take(np.arange(34, 40))[1].tolist() == list(range(34, 40))


def test_records_that_another_process_makes_are_waited_for(keep, tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    one, other = keep(rows), keep(rows)
    assert one._ranges is not None and one._ranges.try_lock(one._number(3))
    later = threading.Timer(0.2, lambda: (one._make({0: 3}), one._ranges.unlock(one._number(3))))
    later.start()
    assert other.take(np.arange(8))[1].tolist() == list(range(8))
    later.join()
    assert rows.made() == list(range(8))


def test_a_bit_that_flips_costs_that_sample_alone_in_a_batch(keep, photos: Photos) -> None:
    kept = keep(photos)
    kept.take(np.arange(8))
    area = kept._row.layers[0]
    slot = area._slot_of(kept._key(5))
    place = int.from_bytes(area._map[slot + 16 : slot + 24], "little")
    area._map[area._arena + place + 200] ^= 4  # behind the head of the entry and the header
    pixels, labels = kept.take(np.arange(8))
    assert labels.tolist() == pixels[:, 0, 0, 0].tolist() == list(range(8))
    assert (pixels == labels.view(-1, 1, 1, 1)).all()
    assert photos.made() == [0, 1, 2, 3, 4, 5, 5, 6, 7]


def test_a_batch_is_its_own(keep) -> None:
    """What is written into it reaches neither the cache nor the source."""
    rows = [(torch.full((4,), float(n)), n) for n in range(4)]
    kept = keep(rows, key="rows")
    for _ in range(3):
        inputs, _ = kept.take(np.arange(4))
        assert inputs[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        inputs.zero_()
    assert [float(row[0][0]) for row in rows] == [0.0, 1.0, 2.0, 3.0]


def test_what_others_made_since_is_not_made_again(keep, photos: Photos) -> None:
    """A run looks, makes its first samples, and meanwhile another one makes the next."""
    one, other = keep(photos), keep(photos)
    make = one._make

    def slow(wanted: Any) -> Any:
        other.take(np.arange(4, 8))
        return make(wanted)

    one._make = slow
    assert one.take(np.arange(8))[1].tolist() == list(range(8))
    assert one.num_made == 4 and photos.made() == list(range(8))
