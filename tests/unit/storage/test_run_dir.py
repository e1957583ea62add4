"""The run directory belongs to one run at a time."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.storage.run_dir import RunDir, lock_directory
from shoal.system.processes import inherit_descriptors


def test_a_free_name_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir(None, "recipes/digits.py:small") as first:
        with RunDir(None, "recipes/digits.py:small") as second:
            assert (first.path, second.path) == (
                Path("runs/digits-small-1"),
                Path("runs/digits-small-2"),
            )
        assert (first.path / "logs").is_dir()


def test_a_directory_in_use_is_refused_until_its_owner_leaves(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", "r"), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        RunDir(tmp_path / "run", "r")
    with RunDir(tmp_path / "run", "r"):
        assert (tmp_path / "run").is_dir()


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", "r") as run_dir:
        run_dir.describe(plan="data=2", ranks=2)
    assert json.loads((tmp_path / "run/run.json").read_text()) == {"plan": "data=2", "ranks": 2}
    with pytest.raises(UsageError, match="already holds a run"):
        RunDir(tmp_path / "run", "r")


def test_without_a_run_what_was_made_goes_and_nothing_else(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", "r") as run_dir:
        (run_dir.path / "logs" / "recipe.log").write_text("")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine" / "logs" / "old").mkdir(parents=True)
    (tmp_path / "mine" / "logs" / "notes").write_text("kept")
    (tmp_path / "mine" / "events.jsonl").write_text("kept")
    with RunDir(tmp_path / "mine", "r") as run_dir:
        (run_dir.path / "logs" / "recipe.log").write_text("")
    left = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*")}
    assert left == {"logs", "logs/old", "logs/notes", "events.jsonl"}


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        RunDir(tmp_path / "file" / "run", "r")


def test_of_a_refused_run_no_directory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those around it that were made for it."""
    monkeypatch.chdir(tmp_path)
    with RunDir(None, "r.py:f"):
        pass
    (tmp_path / "mine").mkdir()
    with RunDir(Path("mine/a/b"), "r.py:f"), lock_directory(Path("kept/checkpoints")):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with lock_directory(tmp_path / "used"):
        (tmp_path / "used" / "step-1").mkdir()
    assert (tmp_path / "used" / "step-1").is_dir()


def test_to_resume_takes_the_last_run_or_begins_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        with RunDir(None, "r.py:f") as run_dir:
            assert not run_dir.is_resumed
            run_dir.describe(recipe="r.py:f", number=number)
    with RunDir(None, "r.py:f", resume=True) as run_dir:
        assert run_dir.is_resumed and run_dir.record()["number"] == 2
    with RunDir(None, "other.py:f", resume=True) as run_dir:
        assert not run_dir.is_resumed and run_dir.path == Path("runs/other-f-1")
    assert not Path("runs/other-f-1").exists(), "no run began there"
    (tmp_path / "runs/r-f-2/run.json").write_text("[")
    with RunDir(None, "r.py:f", resume=True) as run_dir, pytest.raises(UsageError, match="read"):
        run_dir.described()


@pytest.mark.parametrize("is_ours", [False, True])
def test_what_a_recipe_forks_does_not_hold_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """A process of the run does, as long as it lives, and is named."""
    monkeypatch.setattr("shoal.storage.run_dir.LEAVING_S", 0.2)
    read, write = os.pipe()
    command = os.fork()
    if command == 0:
        held = RunDir(tmp_path / "run", "r")
        with inherit_descriptors() if is_ours else nullcontext():
            left = os.fork()
        if left:
            os.write(write, str(left).encode())
        while held:
            signal.pause()
    left = int(os.read(read, 20))
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)
    try:
        named = pytest.raises(UsageError, match=f"left running when it ended .process {left}")
        with named if is_ours else nullcontext(), RunDir(tmp_path / "run", "r"):
            assert not is_ours
    finally:
        os.kill(left, signal.SIGKILL)
        os.close(read)
        os.close(write)
