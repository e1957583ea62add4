"""Servers for tests: they start, stop and come back, die with their parent, or skip the test."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import servers
from tests.support.leaks import is_alive, wait_until
from tests.support.servers import Server, start_memcached, start_redis


def version(server: Server) -> bytes:
    with socket.create_connection(server.address, timeout=5) as connection:
        connection.sendall(b"version\r\n")
        return connection.recv(100)


def test_memcached_starts_stops_and_comes_back() -> None:
    with start_memcached() as server:
        assert version(server).startswith(b"VERSION")
        assert server.url == f"127.0.0.1:{server.port}"
        server.stop()
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            version(server)
        server.start()
        assert version(server).startswith(b"VERSION")
    with pytest.raises(ConnectionRefusedError):
        version(server)


def test_a_server_dies_with_who_started_it(tmp_path: Path) -> None:
    with start_redis() as server:
        pass  # skips where there is none
    code = (
        "from tests.support.servers import start_redis\n"
        "with start_redis() as server:\n"
        "    print(server._process.pid, flush=True)\n"
        "    input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # its directory stays
    )
    assert parent.stdin is not None and parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert wait_until(lambda: not is_alive(child), 10)
    os.waitpid(child, 0)  # orphans of a test come to its process
    assert server.port


def test_what_is_not_installed_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(servers, "_LIKELY", Path("/nowhere"))
    for start, said in [
        (servers.start_redis, "redis-server is not installed"),
        (servers.start_memcached, "apt install memcached"),
        (servers.start_postgres, "initdb is not installed .*apt install postgresql"),
    ]:
        with pytest.raises(pytest.skip.Exception, match=said), start():
            pass


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)redis-server did not start:.*no-such-option"),
        start_redis(None, "--no-such-option", "1"),
    ):
        pass
