"""Sockets of one user: where they lie, how their names stay short, and whose peers they have."""

import os
import socket
import stat
from pathlib import Path

import pytest

from shoal.comm import unix
from shoal.comm.unix import is_own, new_path, reachable, socket_directory
from shoal.errors import UsageError


def bind(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(reachable(path))
    made.listen()
    return made


def test_the_directory_is_its_owners_and_removed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with socket_directory(tmp_path) as found:
            assert found == tmp_path / "sockets"
            assert stat.S_IMODE(found.stat().st_mode) == 0o700
            bind(new_path(str(found))).close()
    finally:
        os.umask(before)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir(mode=0o777)
    (tmp_path / "sockets" / "old").touch()
    with socket_directory(tmp_path) as found:
        assert found.parent == tmp_path and not list(found.iterdir())
        assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    run_dir.mkdir()
    (run_dir / "sockets").symlink_to(elsewhere, target_is_directory=True)
    with socket_directory(run_dir) as found:
        assert found.parent != run_dir
        assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert (elsewhere / "kept").exists() and not found.exists()


def test_where_there_can_be_no_socket_temporary_files_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_sockets(directory: str) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(unix, "_try_out", no_sockets)
    with socket_directory(tmp_path) as found:
        assert not list(tmp_path.iterdir())
        assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert not found.exists()


def test_a_name_that_is_no_text_cannot_be_told(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir()
    with socket_directory(odd) as found:
        assert str(found).isascii() and not list(odd.iterdir())


def test_a_path_may_be_as_deep_as_it_likes(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 120) / ("b" * 120)
    deep.mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with socket_directory(deep) as found:
        path = new_path(str(found))
        with bind(path), socket.socket(socket.AF_UNIX) as near:
            near.connect(reachable(path))
            assert is_own(near)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_path(str(tmp_path))
    monkeypatch.setattr("shoal.comm.unix.os.geteuid", lambda: 12_345)
    with pytest.raises(UsageError, match="this user alone may enter"):
        new_path(str(tmp_path))


def test_peers_of_another_user_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    with near, far:
        assert is_own(near) and is_own(far)
        monkeypatch.setattr("shoal.comm.unix.os.geteuid", lambda: 12_345)
        assert not is_own(near)
    assert not is_own(near)  # closed
