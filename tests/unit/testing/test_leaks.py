"""What a test leaves behind is seen."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from shoal.testing.leaks import left_between, traces, wait_until


def test_a_process_is_seen() -> None:
    before = traces()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (found,) = left_between(before, traces())
    assert found.startswith(f"processes: {process.pid} ")
    process.communicate()
    assert not left_between(before, traces())


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
