"""Segments: found by other processes, of one size for good, and gone with the last holder."""

import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch

from shoal.comm import shared_memory
from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from tests.support.leaks import traces

MOST = 1 << 30


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with closing(SharedSegment.create(10_000)) as made:
        yield made


def in_child(work: Callable[[], bool]) -> bool:
    """What a forked child finds."""
    child = os.fork()
    if not child:
        _leave(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _leave(work: Callable[[], bool]) -> NoReturn:
    code = 2
    try:
        code = 0 if work() else 1
    finally:
        os._exit(code)


def test_it_is_whole_pages_of_zeros_on_a_boundary(segment: SharedSegment) -> None:
    assert segment.num_bytes == segment.place.num_bytes == len(segment.bytes) == 3 * mmap.PAGESIZE
    assert segment.bytes.dtype == torch.uint8 and not segment.bytes.any()
    assert segment.bytes.data_ptr() % 64 == 0


def test_without_large_pages_all_of_it_is_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "use_huge_pages", lambda *_: None)
    with closing(SharedSegment.create(5_000_000)) as small:
        assert os.fstat(small.place.fd).st_blocks * 512 == small.num_bytes
        assert not small.bytes.any()


def test_both_sides_see_what_is_written(segment: SharedSegment) -> None:
    with closing(SharedSegment.open(segment.place, MOST)) as other:
        segment.bytes[64:128].view(torch.float32).fill_(2.5)
        assert other.bytes[64:128].view(torch.float32).tolist() == [2.5] * 16
        other.bytes[0] = 7
        assert segment.bytes[0] == 7
        # Whoever opened it can pass it on.
        with closing(SharedSegment.open(other.place, MOST)) as third:
            assert third.bytes[0] == 7


WRITE = """
import sys, msgspec
from shoal.comm.shared_memory import SegmentHandle, SharedSegment
segment = SharedSegment.open(msgspec.json.decode(sys.argv[1], type=SegmentHandle), 1 << 20)
segment.bytes[5] = segment.bytes[4] + 1
"""


def test_a_process_that_is_no_relative_opens_it(segment: SharedSegment) -> None:
    segment.bytes[4] = 41
    place = msgspec.json.encode(segment.place).decode()
    subprocess.run([sys.executable, "-c", WRITE, place], check=True, timeout=50)
    assert segment.bytes[5] == 42


def test_a_forked_child_holds_it_and_lets_go_of_it_alone(segment: SharedSegment) -> None:
    def work() -> bool:
        segment.bytes[0] = 1
        with closing(SharedSegment.open(segment.place, MOST)) as again:
            again.bytes[1] = 2
        found = segment.place.pid == os.getpid()
        segment.close()
        return found

    assert in_child(work)
    assert segment.bytes[:2].tolist() == [1, 2]
    with closing(SharedSegment.open(segment.place, MOST)) as other:
        assert other.bytes[1] == 2


def test_a_killed_creator_leaves_nothing() -> None:
    before = traces().segments
    mouth, ear = socket.socketpair()
    child = os.fork()
    if not child:
        made = SharedSegment.create(1 << 20)
        made.bytes[9] = 9
        ear.sendall(msgspec.json.encode(made.place))
        signal.pause()
    with mouth, ear:
        place = msgspec.json.decode(mouth.recv(4096), type=SegmentHandle)
    opened = SharedSegment.open(place, MOST)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert opened.bytes[9] == 9  # who holds it goes on
    with pytest.raises(NotShared, match="may be gone"):
        SharedSegment.open(place, MOST)
    assert holders(place.name)
    opened.close()
    assert not holders(place.name)
    assert before == traces().segments and not Path("/dev/shm", place.name).exists()


def holders(name: str) -> list[str]:
    """Where a process of this machine has the segment open or mapped."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it ended, or is not ours
            text = Path(f"/proc/{entry}/maps").read_text()
            for link in os.listdir(f"/proc/{entry}/fd"):
                with suppress(OSError):  # closed since it was listed
                    text += os.readlink(f"/proc/{entry}/fd/{link}")
            found += [entry] if name in text else []
    return found


def test_its_size_is_for_good(segment: SharedSegment) -> None:
    fd = segment.place.fd
    for size in (0, 4096, segment.num_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_tensors_outlive_a_closed_segment() -> None:
    segment = SharedSegment.create(4096)
    name = segment.place.name
    view = segment.bytes[:8].view(torch.float32)
    view.fill_(3.0)
    segment.close()
    segment.close()
    assert view.tolist() == [3.0, 3.0]
    assert not len(segment.bytes)
    del view
    gc.collect()
    assert not holders(name)


def test_a_forgotten_segment_is_given_back() -> None:
    segment = SharedSegment.create(4096)
    name = segment.place.name
    assert holders(name)
    del segment
    gc.collect()
    assert not holders(name)


def test_another_segment_in_its_place_is_refused(segment: SharedSegment) -> None:
    """As on another host, where the same numbers may name a segment of the same size."""
    with (
        closing(SharedSegment.create(segment.num_bytes)) as other,
        pytest.raises(NotShared, match="not the shared memory that was meant"),
    ):
        SharedSegment.open(msgspec.structs.replace(segment.place, fd=other.place.fd), MOST)


def test_a_dead_process_is_refused(segment: SharedSegment) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(NotShared, match="may be gone"):
        SharedSegment.open(msgspec.structs.replace(segment.place, pid=child), MOST)


def test_a_closed_one_is_refused(segment: SharedSegment) -> None:
    place = segment.place
    segment.close()
    with pytest.raises(NotShared):
        SharedSegment.open(place, MOST)


def test_a_file_is_refused(segment: SharedSegment, tmp_path: Path) -> None:
    path = tmp_path / f"memfd:{segment.place.name} (deleted)"
    path.write_bytes(bytes(segment.num_bytes))
    for flags in (os.O_RDWR, os.O_RDWR | os.O_NONBLOCK):
        fd = os.open(path, flags)
        try:
            with pytest.raises(NotShared, match="not the shared memory"):
                SharedSegment.open(msgspec.structs.replace(segment.place, fd=fd), MOST)
        finally:
            os.close(fd)
        path.unlink()
        os.mkfifo(path)


def test_what_is_not_shared_memory_is_not_even_opened(
    segment: SharedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(NotShared, match="not the shared memory"):
        SharedSegment.open(msgspec.structs.replace(segment.place, fd=0), MOST)


def test_one_that_was_exchanged_meanwhile_is_refused(
    segment: SharedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SharedSegment.create(segment.num_bytes)) as other:
        monkeypatch.setattr(os, "open", lambda *_: os.dup(other.place.fd))
        with pytest.raises(NotShared, match="not the shared memory that was meant"):
            SharedSegment.open(segment.place, MOST)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_memory_that_may_change_its_size_is_refused(seals: int) -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(NotShared, match="change its size"):
            SharedSegment.open(SegmentHandle(os.getpid(), fd, 4096, "unsealed"), MOST)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 4096},
        {"num_bytes": 1 << 20},
        {"num_bytes": 0},
        {"num_bytes": -4096},
        {"num_bytes": 1 << 70},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 70},
        {"fd": -1},
        {"fd": 1 << 40},
        {"name": ""},
        {"name": "\0"},
        {"name": "x" * 100_000},
    ],
)
def test_wrong_numbers_are_refused(segment: SharedSegment, change: dict[str, object]) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NotShared):
        SharedSegment.open(msgspec.structs.replace(segment.place, **change), MOST)
    assert os.listdir("/proc/self/fd") == before


def test_more_than_is_allowed_is_refused(segment: SharedSegment) -> None:
    SharedSegment.open(segment.place, segment.num_bytes).close()
    with pytest.raises(NotShared, match="are allowed"):
        SharedSegment.open(segment.place, segment.num_bytes - 1)


@pytest.mark.parametrize("num_bytes", [1 << 20, 1 << 62, 1 << 70])
def test_more_than_is_free_is_not_even_asked_for(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would end other processes to make room, so it must never come to that here."""
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("memory was asked for"))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory was asked for"))
    monkeypatch.setattr(shared_memory, "memory_left_bytes", lambda: 4096)
    with pytest.raises(NotShared, match="are free"):
        SharedSegment.create(num_bytes)


def test_a_system_that_gives_nothing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NotShared, match="Free memory"):
        SharedSegment.create(4096)
    assert os.listdir("/proc/self/fd") == before
