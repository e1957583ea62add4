"""The record stays complete although its writer may die."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import logs
from shoal.events import hosts, metrics_writer
from shoal.events.events import HostUseEvent
from shoal.events.metrics_writer import MetricsWriter, last_recorded_step
from shoal.events.step import StepInfo, Times


def info(step: int) -> StepInfo:
    return StepInfo(step, 1.0 / step, 8, 0.1, None, Times(0.0, 1.0, 0.5, 0.0), 64)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_only_the_scribe_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer, other = MetricsWriter(path, lambda: True), MetricsWriter(path, lambda: False)
    for step in range(1, 6):
        writer(info(step))
        other(info(step))
    other.close()
    writer.close()
    assert steps(path) == [1, 2, 3, 4, 5]
    record = json.loads(path.read_text().splitlines()[0])
    assert record["times"]["compute"] == 1.0 and "norm" not in record


def test_a_step_is_in_the_file_before_its_checkpoint_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, lambda: True)
    for step in (1, 2):
        writer(info(step))
    writer.before_save(info(3))
    assert steps(path) == [1, 2, 3]
    writer.before_save(info(3))  # the save is begun again in another group
    writer(info(3))
    writer(info(4))
    writer.close()
    assert steps(path) == [1, 2, 3, 4]


def test_another_takes_over_where_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    dead = MetricsWriter(path, lambda: True)
    for step in (1, 2, 3):
        dead(info(step))
    dead.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # it died in the middle of a line
    turn = [False]
    heir = MetricsWriter(path, lambda: turn[0])
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
    heir = MetricsWriter(path, lambda: turn[0])
    for step in (1, 2):
        heir(info(step))
    turn[0] = True
    heir.close()
    assert steps(path) == [1, 2]


def test_the_last_step_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_recorded_step(path) == 0
    path.write_text('{"step": 3}\n{"step": 4, "x')
    assert last_recorded_step(path) == 3
    path.write_text("")
    assert last_recorded_step(path) == 0


class Kept:
    """A tracker that keeps what it gets, or does `first` instead."""

    def __init__(self, first: Callable[[], Any] = lambda: None) -> None:
        self.first, self.records, self.is_closed = first, [], False

    def write(self, *records: Any) -> None:
        self.first()
        self.records.extend(records)

    def close(self) -> None:
        self.is_closed = True


def broken() -> None:
    raise OSError("https://me:secret-word@host: no route")


def test_trackers_that_raise_or_hang_cost_a_warning_each_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_writer, "CLOSE_S", 0.3)
    monkeypatch.setattr(logs, "_said", set())
    logs.for_the_screen.clear()
    path, good, gate = tmp_path / "metrics.jsonl", Kept(), threading.Event()
    trackers = {
        "good": lambda: good,
        "raises": lambda: Kept(broken),
        "hangs": lambda: Kept(gate.wait),
        "absent": broken,
    }
    writer = MetricsWriter(path, lambda: True, trackers)  # type: ignore[arg-type]
    for step in range(1, 301):
        writer(info(step))
    writer.end_trackers()
    writer(info(301))  # of a group that formed again after its last step
    writer.close()
    assert steps(path) == [*range(1, 302)]
    assert [record["step"] for record in good.records] == [*range(1, 301)] and good.is_closed
    told = list(logs.for_the_screen)
    assert len(told) == 3 and not any("secret-word" in text for text in told), told
    assert "The sink 'hangs' did not finish in time at the end" in told[-1]
    logs.for_the_screen.clear()
    gate.set()  # so that its thread ends


def test_trackers_get_what_hosts_use_with_the_first_step_after_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "LATEST", latest := {})
    monkeypatch.setattr(metrics_writer, "LATEST", latest)
    tracker = Kept()
    writer = MetricsWriter(tmp_path / "m.jsonl", lambda: True, {"kept": lambda: tracker})
    numbers = {
        name: 7 for name in HostUseEvent.__struct_fields__ if name not in ("time", "host", "step")
    }
    for step in range(1, 9):
        if step in (3, 6):
            latest[1] = HostUseEvent(time=float(step), host=1, step=step, **numbers)
        writer(info(step))
        writer.flush()
    writer.close()
    having = [record for record in tracker.records if "hosts" in record]
    assert [record["step"] for record in having] == [3, 6]
    assert having[0]["hosts"]["1"]["cpu_percent"] == 7
    assert "hosts" not in (tmp_path / "m.jsonl").read_text()
