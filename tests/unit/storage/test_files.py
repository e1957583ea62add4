"""Files that appear whole or not at all."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.storage.files import (
    atomic_replace,
    follow_umask,
    make_private_directory,
    read_private,
    read_regular_file,
    write_atomic,
    write_private,
)


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"one", b"longer than before", b""):
        write_atomic(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.json"]


def test_others_may_read_it_as_any_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"one")
    (tmp_path / "b").write_bytes(b"one")
    modes = {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("a", "b")}
    assert len(modes) == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "a", list[str]()
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    write_atomic(path, b"new")
    assert calls == ["fsync", "replace"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with atomic_replace(path, "1") as one, atomic_replace(path, "2") as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["a"]


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model"
    (tmp_path / "model.partial").write_bytes(b"half of an older")
    with atomic_replace(path) as partial:
        partial.write_bytes(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["model"]


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "a", b"new")


# ---- what is one user's own


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_what_is_private_does_not_follow_the_umask(tmp_path: Path, umask: int) -> None:
    write_private(tmp_path / "key", b"one")
    assert mode(tmp_path / "key") == 0o600
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "key", b"two")
    assert read_private(tmp_path / "key", "") == b"one"
    write_private(tmp_path / "key", b"two", replace=True)
    assert mode(tmp_path / "key") == 0o600 and read_private(tmp_path / "key", "") == b"two"
    assert os.listdir(tmp_path) == ["key"]
    make_private_directory(tmp_path / "a" / "b", "")
    make_private_directory(tmp_path / "a" / "b", "")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_a_private_file_that_others_may_read_or_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    write_private(path, b"one")
    for wrong in (0o640, 0o604, 0o660, 0o602):
        path.chmod(wrong)
        with pytest.raises(UsageError, match=f"mode {wrong:04o}.*chmod 600"):
            read_private(path, "Go away.")
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match=f"belongs to user {os.getuid()}.*Go away"):
        read_private(path, "Go away.")
    with pytest.raises(UsageError, match="belongs to user"):
        make_private_directory(tmp_path, "Go away.")


def test_a_private_file_is_no_link_no_pipe_and_not_long(tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"one")
    (tmp_path / "link").symlink_to("key")
    os.mkfifo(tmp_path / "pipe", 0o600)
    write_private(tmp_path / "long", bytes((1 << 20) + 1))
    for name, why in (("link", "a link"), ("pipe", "regular"), (".", "regular"), ("long", "most")):
        with pytest.raises(OSError, match=why):
            read_private(tmp_path / name, "")
    assert read_private(tmp_path / "link", "", is_chosen=True) == b"one"


def test_a_directory_of_others_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        with pytest.raises(UsageError, match="Go away"):
            make_private_directory(tmp_path / name, "Go away.")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular_file(tmp_path / name)
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(OSError, match="5 bytes, and 4 is the most"):
        read_regular_file(tmp_path / "file", 4)
    assert (
        read_regular_file(tmp_path / "file") == read_regular_file(tmp_path / "file", 5) == b"12345"
    )


def test_files_of_libraries_are_given_the_mode_of_new_ones(tmp_path: Path, umask: int) -> None:
    (tmp_path / "weights").touch(0o600)
    follow_umask(tmp_path)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o666 & ~umask
