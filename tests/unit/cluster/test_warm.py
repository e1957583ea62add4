"""The warm process's socket: nonsense ends its own connection, and other users are not heard."""

import array
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from shoal.cluster import warm
from shoal.cluster.warm import WarmServer
from shoal.errors import UsageError
from tests.support.leaks import wait_until

REQUEST = {"arguments": ["--help"], "cwd": "/", "environment": {"A": "b"}}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A warm process in a thread, which must not fork."""
    monkeypatch.setattr(warm, "ANSWER_S", 0.2)
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=AssertionError("forked")))
    path = tmp_path / "warm.sock"
    thread = threading.Thread(target=WarmServer(path, 60.0, lambda words: 0).serve)
    thread.start()
    assert wait_until(lambda: warm.is_up(path), 20)
    yield path
    if thread.is_alive():
        say(path, bytes(8))
    thread.join(20)
    assert not thread.is_alive()


def say(path: Path, content: bytes, descriptors: tuple[int, ...] = ()) -> bytes:
    """What is answered to these bytes, until the connection ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            connection.sendmsg([content[:8]], rights if descriptors else [])
            connection.sendall(content[8:])
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(100)
        except ConnectionError:
            return b""


def with_length(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big") + content


def nonsense(draws: random.Random) -> bytes:
    """Bytes that are no request, most of them nearly one."""
    kind = draws.randrange(6)
    if kind == 0:
        return draws.randbytes(draws.randrange(1, 40)) or b"x"
    if kind == 1:
        return with_length(b"[" * draws.randrange(1, 200_000))
    if kind == 2:
        return (1 << draws.randrange(27, 64)).to_bytes(8, "big") + b"{}"
    request: dict[str, object] = dict(REQUEST)
    changed = draws.choice([None, 1, [1], {"a": 1}, "words", [["a"]]])
    if kind == 3:
        request[draws.choice(["arguments", "environment"])] = changed
    elif kind == 4:
        request["cwd"] = changed if changed != "words" else 7
    else:
        del request[draws.choice(sorted(request))]
    content = json.dumps(request).encode()
    return with_length(content if kind < 5 else content[: draws.randrange(len(content))])


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.full)])
def test_nonsense_ends_its_own_connection(served: Path, count: int) -> None:
    draws, before = random.Random(1), num_open()
    for _ in range(count):
        content = nonsense(draws)
        if content[:8] != bytes(8):
            assert say(served, content, (0, 1, 2)[: draws.randrange(4)]) == b""
    assert warm.is_up(served)
    assert wait_until(lambda: num_open() <= before, 20), "descriptors that were sent stay open"


def test_other_users_are_not_heard(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("shoal.comm.unix.os.geteuid", lambda: 12_345)
        assert say(served, bytes(8)) == b""  # which would end it
        assert not warm.is_up(served)  # and nobody's environment is given to another user
    assert warm.is_up(served)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "base"))
    folder = warm.socket_path().parents[1 - depth]
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    started: Callable[..., object] = mock.Mock(side_effect=AssertionError("started"))
    monkeypatch.setattr("shoal.cluster.warm.subprocess.Popen", started)
    with pytest.raises(UsageError, match="by others"):
        warm.start()
