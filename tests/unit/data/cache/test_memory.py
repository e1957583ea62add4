"""The memory area: bounded, shared, found by all and gone with the last."""

import errno
import gc
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import faults
from shoal.data.cache import host_memory
from shoal.data.cache.host_memory import attach_host_memory
from shoal.data.cache.memory import (
    LEAST_BYTES,
    NUM_SEGMENTS,
    ArenaSegment,
    MemoryLayer,
    choose_segment,
    geometry,
    lay_out,
    read_geometry,
)
from shoal.errors import UsageError
from shoal.testing.caches import CONTENT, KEY, content_of, in_child, key_of
from tests.support.leaks import wait_until

SIZE = 8000  # of a sample; more than half of a segment of the smallest area


class Time:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("test")
    lay_out(made, LEAST_BYTES)
    yield made
    os.close(made)


@pytest.fixture
def area(descriptor: int, clock: Time) -> Iterator[MemoryLayer]:
    made = MemoryLayer(os.dup(descriptor), clock)
    yield made
    made.close()


def fill(area: MemoryLayer, first: int = 0, size: int = SIZE) -> int:
    """Put samples until one is refused; how many were kept."""
    number = first
    while area.put(key_of(number), content_of(number, size)):
        number += 1
        assert number < first + 10_000, "it has no bound"
    return number - first


@given(st.integers(LEAST_BYTES, 2**40))
def test_an_area_is_no_larger_than_asked_and_little_smaller(num_bytes: int) -> None:
    shape = geometry(num_bytes)
    assert num_bytes - 8192 - 64 * 64 <= shape.num_bytes <= num_bytes
    assert shape.segment_bytes % 64 == 0 and shape.arena % 64 == 0
    assert shape.num_buckets * 256 < 0.04 * num_bytes


def test_an_area_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="at least"):
        geometry(LEAST_BYTES - 1)


@given(
    st.lists(st.builds(ArenaSegment, st.integers(0, 3), st.floats(0, 100)), min_size=1),
    st.floats(0, 100),
)
def test_the_segment_chosen_is_empty_or_the_oldest(
    segments: list[ArenaSegment], since: float
) -> None:
    chosen = choose_segment(segments, since)
    if chosen is None:
        assert all(segment.used and segment.last_read >= since for segment in segments)
    elif segments[chosen].used:
        assert all(segment.used for segment in segments)
        assert segments[chosen].last_read == min(s.last_read for s in segments) < since


def test_what_is_in_use_is_not_evicted(area: MemoryLayer) -> None:
    num_kept = fill(area)
    assert num_kept >= NUM_SEGMENTS
    for number in range(num_kept):
        assert area.get(key_of(number)) == content_of(number, SIZE)
    assert area.get(key_of(num_kept)) is None


def test_what_nobody_used_for_long_makes_room_the_oldest_first(
    area: MemoryLayer, clock: Time
) -> None:
    num_kept = fill(area)
    clock.now += 3600
    for number in range(num_kept // 2, num_kept):
        assert area.get(key_of(number)) is not None
    num_new = fill(area, first=100_000)
    assert abs(num_new - num_kept // 2) <= 2
    found = [area.get(key_of(number)) for number in range(num_kept)]
    assert all(each is None for each in found[: num_kept // 2 - 2])
    assert found[num_kept // 2 + 2 :] == [
        content_of(number, SIZE) for number in range(num_kept // 2 + 2, num_kept)
    ]


def test_a_run_that_starts_later_may_evict_at_once(
    area: MemoryLayer, descriptor: int, clock: Time
) -> None:
    num_kept = fill(area)
    clock.now += 1
    later = MemoryLayer(os.dup(descriptor), clock)
    assert fill(later, first=100_000) == num_kept
    assert later.get(key_of(100_000)) == content_of(100_000, SIZE)
    assert area.get(key_of(0)) is None
    later.close()


def test_more_samples_than_slots_push_each_other_out(area: MemoryLayer) -> None:
    """Many small ones: the index is what is full."""
    num_slots = area.shape.num_buckets * 8
    for number in range(3 * num_slots):
        area.put(key_of(number), content_of(number, 8))
    found = [area.get(key_of(number)) for number in range(3 * num_slots)]
    assert all(each in (None, content_of(n, 8)) for n, each in enumerate(found))
    assert num_slots // 2 < sum(each is not None for each in found) <= num_slots


def test_a_sample_larger_than_a_segment_is_refused_with_one_warning(
    area: MemoryLayer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        assert not area.put(key_of(number), bytes(area.shape.segment_bytes))
    assert area.put(KEY, bytes(area.shape.segment_bytes - 64))
    assert [record.message for record in caplog.records if "too large" in record.message]
    assert len(caplog.records) == 1


@given(st.binary(min_size=32, max_size=32), st.integers(0, 7))
def test_a_slot_of_nonsense_is_a_miss(slot: bytes, number: int) -> None:
    descriptor = os.memfd_create("test")
    lay_out(descriptor, LEAST_BYTES)
    area = MemoryLayer(descriptor)
    try:
        start = area._bucket(KEY)
        area._map[start + 32 * number : start + 32 * number + 32] = KEY + slot[16:]
        assert area.get(KEY) is None
        assert area.put(KEY, CONTENT)
        assert area.get(KEY) == CONTENT
    finally:
        area.close()


def test_a_bound_of_nonsense_is_not_written_past(area: MemoryLayer) -> None:
    """A segment that says it holds more than it can counts as full."""
    for number in range(NUM_SEGMENTS):
        struct.pack_into("<Q", area._map, 4096 + 64 * number, 2**63)
        struct.pack_into("<d", area._map, 4096 + 64 * number + 8, 1e9)
    assert not area.put(KEY, CONTENT)
    assert area.get(KEY) is None


def test_what_was_taken_is_compared_not_what_is_there(area: MemoryLayer) -> None:
    """Another process may overwrite the entry while it is copied."""
    area.put(KEY, CONTENT)
    seen: list[bytes] = []

    def torn(view: memoryview) -> list[bytes]:
        seen.append(bytes(view))
        return [CONTENT[:100], bytes(len(CONTENT) - 100)]

    assert area.take(KEY, lambda view: None) is False
    assert area.take(KEY, lambda view: [bytes(view[:9]), bytes(view[9:])])
    assert area.take(KEY, torn) is False and seen == [CONTENT]
    assert area.get(KEY) is None, "it is forgotten, and put anew"
    assert area.put(KEY, CONTENT) and area.get(KEY) == CONTENT


def test_an_area_that_cannot_be_mapped_leaves_nothing_open(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("shoal.data.cache.memory.mmap.mmap", fail)
    given = os.dup(descriptor)
    with pytest.raises(OSError, match="no memory"):
        MemoryLayer(given)
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given)


def test_another_who_holds_the_lock_only_costs_the_putting(
    area: MemoryLayer, descriptor: int, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MemoryLayer(os.dup(descriptor))
    area.put(KEY, CONTENT)
    assert other.ranges.try_lock(0)
    assert not area.put(key_of(1), CONTENT)
    assert area.get(KEY) == CONTENT
    with monkeypatch.context() as patched:
        patched.setattr(area.ranges, "lock_within", lambda *_: pytest.fail("it waits each time"))
        assert not area.put(key_of(1), CONTENT)
    other.ranges.unlock(0)
    clock.now += 6
    assert area.put(key_of(1), CONTENT)
    other.close()


@pytest.mark.parametrize("point", ["reserved", "entry", "takeover"])
def test_a_death_in_the_middle_of_a_put_is_a_miss(
    area: MemoryLayer, clock: Time, point: str
) -> None:
    if point == "takeover":
        fill(area)
        clock.now += 3600

    def put() -> bool:
        faults._armed[:] = faults.parse(f"cache.{point}:kill")
        return area.put(key, content)

    key, content = key_of(100_000), content_of(7, SIZE)
    assert not in_child(put)
    assert area.get(key) is None
    assert area.put(key, content)
    assert area.get(key) == content


def test_a_file_that_is_no_area_is_not_taken_for_one() -> None:
    descriptor = os.memfd_create("test")
    assert read_geometry(descriptor) is None
    lay_out(descriptor, LEAST_BYTES)
    assert read_geometry(descriptor) == geometry(LEAST_BYTES)
    os.ftruncate(descriptor, 100_000)
    assert read_geometry(descriptor) is None
    os.close(descriptor)


# ---- how processes find it

MEMBER = """
import sys
from shoal.data.cache.host_memory import attach_host_memory
from shoal.testing.caches import CONTENT, KEY
area = attach_host_memory(1 << 20)
if sys.argv[1] == "put":
    area.put(KEY, CONTENT)
print("ok" if area.get(KEY) == CONTENT else "nothing", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    return tmp_path / "shared"


@pytest.fixture
def member(shared: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Start another process that joins, and wait until it has."""
    started: list[subprocess.Popen[str]] = []

    def start(word: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", MEMBER, word]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_share_one_area_that_goes_with_the_last(member, shared: Path) -> None:
    first = member("put")
    assert said(first) == "ok"
    second = member("look")
    assert said(second) == "ok"
    first.kill()  # the one that made it
    first.wait()
    area = attach_host_memory(LEAST_BYTES)
    assert area.get(KEY) == CONTENT
    second.kill()
    second.wait()
    assert area.get(KEY) == CONTENT
    area.close()
    del area
    fresh = attach_host_memory(LEAST_BYTES)
    assert fresh.get(KEY) is None
    fresh.close()


def test_processes_that_start_at_once_share_one(member, shared: Path) -> None:
    processes = [member("put") for _ in range(3)]
    assert [said(process) for process in processes] == ["ok"] * 3
    inodes = {os.stat(f"/proc/{m.pid}/fd/{m.descriptor}").st_ino for m in members(shared)}
    assert len(members(shared)) == 3
    assert len(inodes) == 1


def members(shared: Path) -> list[host_memory._Attachment]:
    [path] = shared.iterdir()
    with path.open("rb") as file:
        return host_memory._read(file.fileno())


def test_one_process_has_one_area(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = attach_host_memory(2 * LEAST_BYTES), attach_host_memory(2 * LEAST_BYTES)
    assert first is second
    assert not caplog.records
    assert attach_host_memory(LEAST_BYTES) is first
    assert "has no effect" in caplog.text
    for _ in range(3):
        assert first.put(KEY, CONTENT)
        first.close()
    assert attach_host_memory(LEAST_BYTES) is not first


def test_a_full_disk_costs_no_more_than_being_found(
    shared: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_memory, "_write", no_space)
    area = attach_host_memory(LEAST_BYTES)
    assert area.put(KEY, CONTENT)
    assert "Other runs may not find" in caplog.text
    area.close()


def test_a_child_is_found_after_its_parent_has_ended(shared: Path) -> None:
    """Ranks outlive the process that loaded the recipe; a later run finds their samples."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        area = attach_host_memory(LEAST_BYTES)
        if os.fork() == 0:
            area.put(KEY, CONTENT)
            os.write(write, str(os.getpid()).encode())
            time.sleep(30)
        os._exit(0)
    os.waitpid(parent, 0)
    child = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    try:
        area = attach_host_memory(LEAST_BYTES)
        assert area.get(KEY) == CONTENT
        area.close()
    finally:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 5.0)


def test_a_list_of_nonsense_is_begun_anew(shared: Path) -> None:
    shared.mkdir(mode=0o700)
    for content in (b"", b"{", b'[{"pid": 1}]', b"[]", b"\xff\x00"):
        (shared / host_memory._list_name()).write_bytes(content)
        area = attach_host_memory(LEAST_BYTES)
        assert [m.pid for m in members(shared)] == [os.getpid()]
        area.close()


def test_hosts_that_share_a_directory_have_lists_of_their_own(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their process namespaces have the same number."""
    names = []
    for host in ("one", "other"):
        (tmp_path / host).write_text(f"{host}\n")
        monkeypatch.setattr(host_memory, "_BOOT_ID", str(tmp_path / host))
        names.append(host_memory._list_name())
        attach_host_memory(LEAST_BYTES).close()
    assert {path.name for path in shared.iterdir()} == set(names) and len(set(names)) == 2


def test_descriptors_of_others_are_not_touched(shared: Path) -> None:
    """A number that now belongs to another program, or to another kind of file."""
    shared.mkdir(mode=0o700)
    others = [{"pid": 1, "descriptor": 0}, {"pid": os.getpid(), "descriptor": 0}]
    others += [{"pid": 2**22 + 1, "descriptor": 3}, {"pid": -1, "descriptor": -1}]
    (shared / host_memory._list_name()).write_text(str(others).replace("'", '"'))
    area = attach_host_memory(LEAST_BYTES)
    assert area.get(KEY) is None
    assert [m.pid for m in members(shared)] == [os.getpid()]
    area.close()


def test_more_memory_than_there_is_is_refused(shared: Path) -> None:
    with pytest.raises(UsageError, match="this machine has"):
        attach_host_memory(2**50)


def test_a_list_that_others_can_write_is_refused(shared: Path) -> None:
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UsageError, match="written by others"):
        attach_host_memory(LEAST_BYTES)


def test_a_lock_on_the_list_that_stays_costs_the_sharing(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_PATIENCE_S", 0.02)
    shared.mkdir(mode=0o700)
    with (shared / host_memory._list_name()).open("a+b") as file:
        assert host_memory._locked(file.fileno())
        area = attach_host_memory(LEAST_BYTES)
        assert area.put(KEY, CONTENT) and area.get(KEY) == CONTENT
        area.close()
    assert "keeps its samples to itself" in caplog.text


def test_the_area_costs_what_is_used_of_it(shared: Path) -> None:
    area = attach_host_memory(256 << 20)
    area.put(KEY, CONTENT)
    assert os.fstat(area.descriptor).st_blocks * 512 < 1 << 20
    area.close()
