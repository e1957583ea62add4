"""A directory of runs and studies is listed, however many there are and whatever they hold."""

import json
import os
from pathlib import Path

import pytest

from shoal.ui import listing
from shoal.ui.listing import RunDirectory
from tests.unit.ui.made_runs import make_run, step_line, write_lines


@pytest.fixture(autouse=True)
def no_queue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def test_many_runs_are_listed_and_a_second_look_reads_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(500):
        make_run(tmp_path / "runs" / f"run-{number}", steps=1)
    runs = RunDirectory(tmp_path / "runs")
    assert len(runs.list_all().runs) == 500
    read = []
    own = listing.read_row
    monkeypatch.setattr(
        listing, "read_row", lambda place, *more: read.append(place) or own(place, *more)
    )
    with (tmp_path / "runs/run-7/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 0.25}) + "\n")
    found = {row.id: row for row in runs.list_all().runs}
    assert read == [tmp_path / "runs/run-7"] and found["run-7"].loss == 0.25


def test_one_run_is_a_directory_too(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=5)
    (row,) = RunDirectory(tmp_path / "run").list_all().runs
    assert (row.id, row.state, row.step) == (".", "done", 5)


@pytest.mark.parametrize("name", ["servers", "images", "logs", "trace", "checkpoints"])
def test_a_run_may_have_the_name_of_a_part_of_a_run(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / name, steps=1)
    (tmp_path / name / name).mkdir()
    assert [row.id for row in RunDirectory(tmp_path).list_all().runs] == [name]


def test_a_study_and_its_trials(tmp_path: Path) -> None:
    study = tmp_path / "runs/digits-tune-1"
    make_run(study / "trials/0000", steps=5)
    make_run(study / "trials/0001", steps=5, made=2)
    about = {"recipe": "a.py:b", "settings": {}, "space": "lr=log:1e-3..1", "metric": "loss:min"}
    (study / "study.json").write_text(json.dumps(about))
    trials = [
        {"trial": 0, "state": "complete", "value": 0.5, "settings": {}, "run_dir": "x"},
        {"trial": 1, "state": "pruned", "value": None, "settings": {}, "run_dir": "y"},
    ]
    best = {"trial": 0, "value": 0.5, "settings": {}, "run_dir": "x"}
    (study / "result.json").write_text(json.dumps({"best": best, "trials": trials, "finished": 2}))
    found = RunDirectory(tmp_path / "runs").list_all()
    (row,) = found.studies
    assert (row.id, row.finished, row.best, row.best_trial) == ("digits-tune-1", 2, 0.5, 0)
    assert row.trials == [(0, "complete", 0.5), (1, "pruned", None)]
    assert {run.study for run in found.runs} == {"digits-tune-1"}


def test_what_cannot_be_read_has_a_row_or_a_sentence(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/torn")
    (tmp_path / "runs/torn/run.json").write_text('{"recipe": ')
    make_run(tmp_path / "runs/pipe")
    (tmp_path / "runs/pipe/run.json").unlink()
    os.mkfifo(tmp_path / "runs/pipe/run.json")
    (tmp_path / "runs/study").mkdir()
    (tmp_path / "runs/study/study.json").write_text("[]")
    found = RunDirectory(tmp_path / "runs").list_all()
    assert {row.id: row.state for row in found.runs} == {"torn": "unreadable", "pipe": "unreadable"}
    assert "no JSON object" in found.studies[0].problem
    assert "cannot be read" in RunDirectory(tmp_path / "none").list_all().problems[0]


def test_only_what_is_in_the_list_is_found(tmp_path: Path) -> None:
    make_run(tmp_path / "secret", steps=2)
    make_run(tmp_path / "runs/one", steps=2)
    runs = RunDirectory(tmp_path / "runs")
    assert runs.find("one") == tmp_path / "runs/one"
    (tmp_path / "runs/linked").symlink_to(tmp_path / "secret")
    (tmp_path / "runs/outside").symlink_to(tmp_path)
    for name in (
        *("../secret", "one/../../secret", "", str(tmp_path / "secret"), "one/", "one\0", "none"),
        *("linked", "outside/secret", ".", "./one", "a" * 300),
    ):
        assert runs.find(name) is None, name
    assert {row.id for row in runs.list_all().runs} == {"one"}


def test_a_long_record_is_read_from_its_end(tmp_path: Path) -> None:
    import random

    run = make_run(tmp_path / "runs/one", steps=5000)
    assert (run / "metrics.jsonl").stat().st_size > 4 * listing.TAIL_BYTES
    write_lines(run / "metrics.jsonl", [step_line(5001, 2, random.Random(0), loss=0.125)], "a")
    (row,) = RunDirectory(tmp_path / "runs").list_all().runs
    assert (row.step, row.loss) == (5001, 0.125)
