"""A goal, and the reports of a trial's record."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.tuning.objective import (
    NUM_WINDOWS,
    Goal,
    RecordReader,
    TrialReport,
    TrialStep,
    reports_of_losses,
)


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("loss", Goal("loss", False)),
        ("accuracy:max", Goal("accuracy", True)),
        ("accuracy:min", Goal("accuracy", False)),
        ("top5_accuracy", Goal("top5_accuracy", True)),
        ("error", Goal("error", False)),
    ],
)
def test_goals_are_read(text: str, goal: Goal) -> None:
    assert Goal.parse(text) == goal
    assert Goal.parse(str(goal)) == goal


@pytest.mark.parametrize("text", ["", ":max", "loss:up", "loss:"])
def test_other_goals_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--metric"):
        Goal.parse(text)


def test_a_metric_that_is_not_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean 'accuracy'"):
        Goal("acuracy", True).refuse_unknown(["loss", "accuracy"])


@given(st.lists(st.floats(-1e3, 1e3), min_size=1), st.booleans())
def test_the_best_so_far(values: list[float], is_max: bool) -> None:
    best = max if is_max else min
    found = list(Goal("x", is_max).best_so_far(values))
    assert found == [best(values[: i + 1]) for i in range(len(values))]


@given(st.integers(1, 300), st.integers(0, 300))
def test_windows_of_losses_are_whole_and_end_at_the_last_step(num_steps: int, made: int) -> None:
    steps = [TrialStep(i, float(i)) for i in range(1, min(made, num_steps) + 1)]
    found = reports_of_losses(steps, num_steps)
    assert len(found) <= NUM_WINDOWS * 2
    assert all(report.step <= len(steps) for report in found)
    if made >= num_steps:
        assert found[-1].step == num_steps
    size = max(1, num_steps // NUM_WINDOWS)
    for report in found:
        first = (report.step - 1) // size * size + 1
        assert math.isclose(report.value, (first + report.step) / 2)


def write(path: Path, *records: object) -> None:
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def test_evaluations_are_read_as_they_come(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path, Goal("accuracy", True), evaluates=True)
    assert reader.reports() == []
    write(tmp_path / "metrics.jsonl", {"step": 5, "loss": 1.0})
    write(tmp_path / "events.jsonl", {"event": "saved", "step": 5})
    write(
        tmp_path / "events.jsonl",
        {"event": "evaluated", "step": 5, "evaluation": {"loss": 2.0, "accuracy": 0.5}},
    )
    assert reader.reports() == [TrialReport(5, 0.5)]
    assert reader.last == TrialStep(5, 1.0)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"evaluated","step":10,"evalu')  # being written
    assert reader.reports() == [TrialReport(5, 0.5)]
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'ation":{"accuracy":null}}\n')
    assert reader.reports()[0] == TrialReport(5, 0.5)
    assert math.isnan(reader.reports()[1].value)


def test_a_record_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path, Goal(), evaluates=False)
    (tmp_path / "run.json").write_text('{"num_steps": 40}')
    write(tmp_path / "metrics.jsonl", *({"step": i, "loss": 1.0} for i in range(1, 9)))
    assert [report.step for report in reader.reports()] == [2, 4, 6, 8]
    cut = tmp_path / "cut"
    write(cut, *({"step": i, "loss": 3.0} for i in range(1, 5)))
    cut.replace(tmp_path / "metrics.jsonl")
    assert reader.reports() == [TrialReport(2, 3.0), TrialReport(4, 3.0)]
