"""The disk layer: bounded, least recently used first, and read-only when the disk is full."""

import errno
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import faults
from shoal.data.cache import disk as disk_module
from shoal.data.cache.disk import LEAST_BYTES, CacheFile, DiskLayer, EvictionBackoff, choose_evicted
from shoal.errors import UsageError
from shoal.testing.caches import CONTENT, KEY, content_of, in_child, key_of

SIZE = 40_000  # takes ten blocks of 4 KiB with its seal
TAKEN = 40_960
MOST = 32 * TAKEN


class Time:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def opened(tmp_path: Path, clock: Time) -> Callable[[], DiskLayer]:
    return lambda: DiskLayer(tmp_path / "kept", MOST, clock)


def held(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "kept").glob("*/*") if path.is_file()]


def put(disk: DiskLayer, *numbers: int) -> list[bool]:
    return [disk.put(key_of(number), content_of(number, SIZE)) for number in numbers]


def has(disk: DiskLayer, *numbers: int) -> list[bool]:
    found = [disk.get(key_of(number)) for number in numbers]
    assert all(each in (None, content_of(n, SIZE)) for n, each in zip(numbers, found))
    return [each is not None for each in found]


@given(
    st.lists(st.builds(CacheFile, st.just(""), st.integers(0, 9), st.floats(0, 100)), max_size=30),
    st.integers(0, 100),
    st.floats(0, 100),
)
def test_what_is_evicted_is_the_oldest_and_no_more_than_needed(
    kept: list[CacheFile], num_bytes: int, since: float
) -> None:
    chosen = choose_evicted(kept, num_bytes, since)
    left = list(kept)
    for one in chosen:
        left.remove(one)
    assert all(one.last_used < since for one in chosen)
    assert all(a.last_used <= b.last_used for a in chosen for b in left)
    freed = sum(one.num_bytes for one in chosen)
    if freed < num_bytes:
        assert all(one.last_used >= since for one in left)
    elif chosen:
        assert freed - chosen[-1].num_bytes < num_bytes


def test_the_least_recently_used_go_first(opened, clock: Time, tmp_path: Path) -> None:
    first = opened()
    for number in range(32):
        clock.now += 1
        assert put(first, number) == [True]
    clock.now += 61  # a reading is noted once a minute
    assert has(first, 0, 1, 2) == [True] * 3
    first.close()
    clock.now += 61
    second = opened()
    assert has(second, 3, 4) == [True] * 2
    assert put(second, 100) == [True]
    # Down to nine tenths: 32 + 1 - 28.8 = 4.2 of them go.
    assert has(second, *range(11)) == [*[True] * 5, *[False] * 5, True]
    assert has(second, *range(11, 32), 100) == [True] * 22
    assert sum(disk_module._blocks(path.stat().st_size) for path in held(tmp_path)) <= MOST
    second.close()


def test_a_run_does_not_evict_what_it_has_used(opened, clock: Time) -> None:
    """More samples than fit: those that came first stay, and are found in the next pass."""
    disk = opened()
    assert put(disk, *range(40)) == [*[True] * 32, *[False] * 8]
    assert has(disk, *range(40)) == [*[True] * 32, *[False] * 8]
    clock.now += 25 * 3600  # a day without being used
    assert put(disk, 50) == [True]
    disk.close()


def test_a_full_directory_is_counted_seldom_by_all_processes_together(
    opened, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    start, counted = clock.now + 4, DiskLayer._counted

    def noted(self: DiskLayer, now: float) -> list[CacheFile]:
        times.append(now - start)
        return counted(self, now)

    monkeypatch.setattr(DiskLayer, "_counted", noted)
    disks = []
    for _ in range(4):
        clock.now += 1
        disks.append(opened())
    put(disks[0], *range(32))
    del times[:]
    for number in range(200):
        clock.now += 90
        assert put(disks[number % 4], 100 + number) == [False]
    # Once by each that was opened after the one who counted, and then for all of them together.
    assert sum(when < 400 for when in times) <= 4
    later = [when for when in times if when >= 400]
    pauses = [after - before for before, after in pairwise(later)]
    assert len(later) <= 10 and pauses == sorted(pauses)
    assert max(pauses) <= disk_module._MOST_FULL_S + 100
    del times[:]
    late = opened()  # what the others used is not this one's to keep
    assert put(late, 99) == [True] and len(times) == 1
    for disk in (*disks, late):
        disk.close()


@given(*[st.integers(0, 10_000)] * 5)
def test_full_is_not_for_ever(opened: int, until: int, pause: int, own: int, now: int) -> None:
    note = EvictionBackoff(opened, until, pause)
    if note.holds(own, now):
        assert own <= opened and now < until <= now + disk_module._MOST_FULL_S
    again = note.still(own, now)
    assert again.holds(own, now) and again.holds(opened, now)
    assert disk_module._FULL_S <= again.pause_s <= disk_module._MOST_FULL_S


def test_the_bound_holds_for_two_at_once(opened, clock: Time, tmp_path: Path) -> None:
    first, second = opened(), opened()
    for number in range(0, 60, 2):
        put(first, number)
        put(second, number + 1)
    assert len(held(tmp_path)) == 32
    first.close()
    second.close()


def test_parts_of_the_dead_are_removed_and_others_files_are_not(
    opened, clock: Time, tmp_path: Path
) -> None:
    disk = opened()
    put(disk, *range(31))
    folder = held(tmp_path)[0].parent
    old, young, own = folder / ".part-0", folder / ".part-1", folder / "notes.txt"
    for path in (old, young, own):
        path.write_bytes(bytes(100))
        os.utime(path, (clock.now, clock.now))
    os.utime(old, (clock.now - 3601, clock.now - 3601))
    disk.close()
    clock.now += 1
    disk = opened()
    assert put(disk, 100, 101) == [True, True]
    assert not old.exists()
    assert young.exists() and own.exists()
    disk.close()


def test_a_count_of_nonsense_is_counted_anew(opened, clock: Time, tmp_path: Path) -> None:
    disk = opened()
    put(disk, *range(31))
    disk.close()
    used = tmp_path / "kept" / "used"
    for number, count in enumerate((None, b"", b"abc", struct.pack("<Q", 2**63))):
        used.unlink() if count is None else used.write_bytes(count)
        disk = opened()
        assert put(disk, 100, 101) == [True, False], number
        assert struct.unpack_from("<Q", used.read_bytes())[0] == MOST
        disk.close()


def test_a_death_before_the_rename_leaves_no_sample(opened, tmp_path: Path) -> None:
    disk = opened()
    for point in ("disk", "rename"):

        def die(point: str = point) -> bool:
            faults._armed[:] = faults.parse(f"cache.{point}:kill")
            return disk.put(KEY, CONTENT)

        assert not in_child(die)
        assert disk.get(KEY) is None
    assert disk.put(KEY, CONTENT)
    assert disk.get(KEY) == CONTENT
    assert len(held(tmp_path)) == 3  # two parts that the next count removes in an hour
    disk.close()


def test_a_full_disk_is_told_once_and_still_read(
    opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = opened()
    put(disk, 1)
    monkeypatch.setattr(faults, "_armed", faults.parse("cache.disk:full"))
    assert put(disk, 2, 3) == [False, False]
    assert has(disk, 1, 2, 3) == [True, False, False]
    assert len(held(tmp_path)) == 1, "a part was left"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(errno.ENOSPC) in caplog.text
    disk.close()


def test_a_file_that_comes_in_parts_is_read_whole(
    opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives as much as it likes at a time, and never more than 2 GiB."""
    disk, whole = opened(), os.readv
    put(disk, 1)
    for most in (1, 7, 16, 17, 30_000):

        def some(descriptor: int, buffers: list[memoryview], most: int = most) -> int:
            return whole(descriptor, [memoryview(buffers[0])[:most]])

        monkeypatch.setattr(os, "readv", some)
        assert has(disk, 1) == [True]
    path = held(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert has(disk, 1) == [False]
    disk.close()


def test_damage_is_told_once(opened, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = opened()
    put(disk, 1, 2)
    for path in held(tmp_path):
        path.write_bytes(b"not this")
    assert has(disk, 1, 2) == [False, False]
    assert len(caplog.records) == 1 and "not used" in caplog.text
    assert not held(tmp_path)
    assert put(disk, 1) == [True]
    disk.close()


def test_a_directory_that_vanishes_costs_the_layer_alone(
    opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = opened()
    put(disk, 1)
    (tmp_path / "kept").rename(tmp_path / "elsewhere")
    assert has(disk, 1) == [False]
    assert put(disk, 2) == [False]
    assert len(caplog.records) == 1
    disk.close()


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        DiskLayer(tmp_path / "file" / "kept", MOST)
    with pytest.raises(UsageError, match="at least"):
        DiskLayer(tmp_path / "kept", LEAST_BYTES - 1)
