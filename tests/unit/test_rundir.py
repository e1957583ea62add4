"""The run directory belongs to one run at a time."""

import json
import os
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.rundir import RunDir, claimed


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
    with RunDir(Path("mine/a/b"), "r.py:f"), claimed(Path("kept/checkpoints")):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with claimed(tmp_path / "used"):
        (tmp_path / "used" / "step-1").mkdir()
    assert (tmp_path / "used" / "step-1").is_dir()
