"""The record stays complete although its writer may die."""

import json
from pathlib import Path

<<<<<<< HEAD:tests/unit/events/test_scribe.py
from shoal.events.scribe import Scribe, last_step
from shoal.events.step import StepInfo, Times
=======
from shoal.hooks import StepInfo, Times
from shoal.metrics.scribe import Scribe, last_step, loss_on_record
>>>>>>> 11604db (report: tell the loss of a last step that an earlier command made):tests/unit/metrics/test_scribe.py


def info(step: int) -> StepInfo:
    return StepInfo(step, 1.0 / step, 8, 0.1, None, Times(0.0, 1.0, 0.5, 0.0), 64)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_only_the_scribe_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer, other = Scribe(path, lambda: True), Scribe(path, lambda: False)
    for step in range(1, 6):
        writer(info(step))
        other(info(step))
    other.close()
    writer.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    record = json.loads(path.read_text().splitlines()[0])
    assert record["times"]["compute"] == 1.0 and "norm" not in record


def test_another_takes_over_where_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    dead = Scribe(path, lambda: True)
    for step in (1, 2, 3):
        dead(info(step))
    dead.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # it died in the middle of a line
    turn = [False]
    heir = Scribe(path, lambda: turn[0])
    for step in range(1, 7):
        heir(info(step))
    turn[0] = True
    heir(info(7))
    heir.close()
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["step"] for line in whole] == [1, 2, 3, 4, 5, 6, 7]


def test_whoever_becomes_scribe_after_the_last_step_still_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    turn = [False]
    heir = Scribe(path, lambda: turn[0])
    for step in (1, 2):
        heir(info(step))
    turn[0] = True
    heir.close()
    assert steps(path) == [1, 2]


def test_the_last_step_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_text('{"step": 3}\n{"step": 4, "x')
    assert last_step(path) == 3
    path.write_text("")
    assert last_step(path) == 0


def test_the_loss_of_the_last_step_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert loss_on_record(path, 3) is None
    path.write_text('{"step": 2, "loss": 0.5}\n{"step": 3, "loss": 0.25}\n{"step": 4, "x')
    assert loss_on_record(path, 3) == 0.25
    assert loss_on_record(path, 2) is None
    path.write_text('{"step": 3, "loss": null}\n')
    assert loss_on_record(path, 3) is None
