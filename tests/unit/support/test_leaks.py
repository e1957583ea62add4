"""What a test leaves behind is seen."""

import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leaks import left_between, traces, wait_until


def test_a_process_is_seen() -> None:
    before = traces()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (found,) = left_between(before, traces())
    assert found.startswith(f"processes: {process.pid} ")
    process.communicate()
    assert not left_between(before, traces())


def test_a_process_whose_number_is_below_ours_is_seen() -> None:
    """As it is where the numbers of processes have begun again."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root may say which number the next process gets")
    before, number = traces(), last.read_text()
    last.write_text("300")
    try:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    finally:
        last.write_text(number)
    try:
        assert process.pid < os.getpid()
        assert f"processes: {process.pid} " in " ".join(left_between(before, traces()))
    finally:
        process.communicate(b"\n")


def test_an_orphan_is_seen() -> None:
    before = traces()
    code = "from subprocess import *; print(Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (found,) = left_between(before, traces())
    assert f"{done.stdout.strip()} sleep 60" in found
    os.kill(int(done.stdout), 9)
    os.waitpid(int(done.stdout), 0)


def test_a_port_a_thread_a_variable_and_a_file_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="forgotten")
    thread.start()
    monkeypatch.setenv("SHOAL_LEFT", "1")
    path = Path(tempfile.mkstemp()[1])
    with socket.create_server(("127.0.0.1", 0)):
        found = " ".join(left_between(before, traces()))
    gate.set()
    thread.join()
    path.unlink()
    assert all(word in found for word in ("ports", "forgotten", "SHOAL_LEFT=1", path.name))
    monkeypatch.undo()
    assert wait_until(lambda: not left_between(before, traces()), 2)


def test_a_variable_that_vanished_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LEFT", "1")
    before = traces()
    monkeypatch.delenv("SHOAL_LEFT")
    assert left_between(before, traces()) == ["variables gone: SHOAL_LEFT=1"]


# ---- shared memory, which is the machine's


@pytest.fixture
def name() -> Iterator[str]:
    """Of a file in /dev/shm that is not there yet, and not afterwards."""
    made = f"shoal-test-{secrets.token_hex(8)}"
    yield made
    Path("/dev/shm", made).unlink(missing_ok=True)


def test_a_segment_of_this_process_is_seen_until_it_is_gone(name: str) -> None:
    before, path = traces(), Path("/dev/shm", name)
    with path.open("x+b") as file:
        file.truncate(64)
        mapped = mmap.mmap(file.fileno(), 64)
    assert left_between(before, traces()) == [f"segments: {name}"]
    mapped.close()
    assert left_between(before, traces()) == [f"segments: {name}"], "nobody holds it any more"
    path.unlink()
    assert not left_between(before, traces())


def test_a_segment_that_a_child_maps_is_seen(name: str) -> None:
    before = traces()
    code = f"""
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda *_: None  # which would clean up after it
held = SharedMemory({name!r}, create=True, size=64)
print("made", flush=True)
input()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "made\n"
    assert f"segments: {name}" in left_between(before, traces())
    child.communicate()
    assert left_between(before, traces()) == [f"segments: {name}"]


def test_what_torch_left_of_a_dead_child_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = traces()
    child.communicate()
    path = Path(f"/dev/shm/torch_{child.pid}_{secrets.randbelow(2**30)}_0")
    path.touch()
    try:
        assert f"segments: {path.name}" in left_between(before, traces())
    finally:
        path.unlink()


@pytest.mark.parametrize("named", ["shoal-test-{}", "torch_1_{}_0", "psm_{}", "sem.{}"])
def test_a_file_of_another_program_is_not_judged(named: str) -> None:
    """Nobody here made it or holds it: it is somebody else's work on the same machine."""
    before = traces()
    path = Path("/dev/shm", named.format(secrets.randbelow(2**40)))
    path.touch()
    try:
        assert not left_between(before, traces())
    finally:
        path.unlink()
