"""Files that appear whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from shoal.files import replacing, write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"one", b"longer than before", b""):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.json"]


def test_others_may_read_it_as_any_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"one")
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
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "a", list[str]()
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    write_whole(path, b"new")
    assert calls == ["fsync", "replace"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path, "1") as one, replacing(path, "2") as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["a"]


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model"
    (tmp_path / "model.partial").write_bytes(b"half of an older")
    with replacing(path) as partial:
        partial.write_bytes(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["model"]


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "a", b"new")
