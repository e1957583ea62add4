"""A run directory is read, whatever it holds: torn, cut, of another version, gone."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.storage.line_tail import LineTail
from shoal.ui import history
from shoal.ui.run_reader import MOST_CELLS, RunReader, read_view
from tests.mutations import mutated
from tests.unit.ui.made_runs import (
    BEGAN,
    event_lines,
    loss_of_rank,
    make_run,
    step_line,
    write_lines,
)


def test_a_trial_is_called_by_its_study_too(tmp_path: Path) -> None:
    """Studies number their trials alike, and a comparison may have trials of two."""
    (tmp_path / "study" / "trials").mkdir(parents=True)
    assert read_view(make_run(tmp_path / "study" / "trials" / "0003")).name == "study/trials/0003"
    assert read_view(make_run(tmp_path / "run")).name == "run"


def test_a_run_that_is_over(tmp_path: Path) -> None:
    view = read_view(make_run(tmp_path / "run", steps=50))
    assert (view.state, view.step, view.num_steps) == ("done", 50, 50)
    assert view.curves.step == list(range(1, 51)) and len(view.curves.figures["loss"].mean) == 50
    assert [worker.name for worker in view.strips.workers] == ["rank 0", "rank 1"]
    assert view.totals.steps == 50 and view.totals.samples == 50 * 64
    assert not view.problems and not view.incidents
    assert {(one.name, one.origin) for one in view.settings} >= {
        ("steps", "--set"),
        ("seed", "default"),
    }
    assert sum(view.totals.seconds.values()) == pytest.approx(
        sum(sum(worker.totals.values()) for worker in view.strips.workers) / 2, rel=0.01
    )


def test_a_killed_rank_is_on_its_strip_and_among_the_incidents(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "events.jsonl", loss_of_rank(1, 20), "a")
    view = read_view(run)
    (incident,) = view.incidents
    assert incident.what == "rank 1 was lost" and incident.step == 20
    assert incident.lost_s == pytest.approx(0.4) and "SIGKILL" in incident.cause
    ours, killed = view.strips.workers
    assert not ours.gone and killed.is_alive
    assert killed.gone == [(BEGAN + 0.4, pytest.approx(BEGAN + 0.8))]


def test_who_does_not_come_back_is_dead_while_the_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", made=20)
    write_lines(run / "events.jsonl", loss_of_rank(1, 20)[:1], "a")
    with open(run / "owner", "w") as file:
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        view = read_view(run)
    assert view.state == "running" and not view.strips.workers[1].is_alive
    assert view.strips.workers[1].gone[0][1] is None


def test_what_is_written_later_is_read_without_what_was_read_before(tmp_path: Path) -> None:
    run, draw = make_run(tmp_path / "run", steps=100, made=30), random.Random(1)
    reader = RunReader(run)
    assert reader.look().step == 30
    line = json.dumps(step_line(31, 2, draw))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[:40])
        file.flush()
        assert reader.look().step == 30 and not reader.look().problems  # a line under way
        file.write(line[40:] + "\n")
        file.flush()
        assert reader.look().step == 31
    whole, again = read_view(run), reader.look()
    assert whole.curves == again.curves and whole.strips == again.strips


def test_a_long_record_is_shown_before_it_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=200)
    more = LineTail.more
    monkeypatch.setattr(LineTail, "more", lambda tail, most: more(tail, 10_000))
    reader, steps = RunReader(run), []
    while True:
        view = reader.look(most_s=0.0)
        steps.append(view.step)
        assert view.state == "done"
        if not reader.is_behind:
            break
        assert "still being read" in view.problems[-1]
    assert len(steps) > 3 and steps == sorted(steps) and steps[0] < steps[-1] == 200
    assert view.curves == read_view(run).curves and not view.problems


def test_a_run_that_resumes_from_an_earlier_step_is_read_again(tmp_path: Path) -> None:
    run, draw = make_run(tmp_path / "run", steps=100, made=30), random.Random(1)
    reader = RunReader(run)
    assert reader.look().step == 30
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text("".join(lines[:10]))
    os.replace(run / "new", run / "metrics.jsonl")
    view = reader.look()
    assert view.step == 10 and view.curves.step[-1] == 10 and len(view.strips.workers) == 2
    write_lines(run / "metrics.jsonl", [step_line(11, 2, draw)], "a")
    assert reader.look().step == 11


def test_the_time_between_two_commands_is_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, made=30)
    later = {"event": "started", "time": BEGAN + 3600, "member": 0, "pid": 1}
    write_lines(run / "events.jsonl", [later], "a")
    totals = read_view(run).totals
    assert totals.paused_s == 3600 and totals.wall_s == pytest.approx(3601)


def test_bad_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 11, "loss"\n\xff\xfe\n{"step": "x"}\n' + b"[" * 5000 + b"\n{}\n")
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'[1]\n{"event": 5, "time": "now"}\n{"event": "saved", "step": 3}\n')
    view = read_view(run)
    assert view.step == 10
    assert view.problems == [
        "1 line of events.jsonl cannot be read, and are left out.",
        "5 lines of metrics.jsonl cannot be read, and are left out.",
    ]
    assert [one.step for one in view.checkpoints] == [3]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" + b"x" * 5000 + b"\nb\n")
    tail = LineTail(path)
    assert tail.more(100) == (b"a\n", False)
    assert tail.more(100) == (b"b\n", False)
    assert tail.num_skipped == 1
    with path.open("ab") as file:
        file.write(b"y" * 150)
    assert tail.more(100) == (b"", False) and tail.more(100) == (b"", False)
    with path.open("ab") as file:
        file.write(b"y\nc\n")
    assert tail.more(100) == (b"c\n", False) and tail.num_skipped == 2


def test_an_older_run_has_what_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"recipe": "a.py:b", "num_steps": 3, "plan": "banana=2"}')
    old = [{"step": step, "loss": 1.0, "times": {"compute": 1.0}} for step in (1, 2, 3)]
    write_lines(run / "metrics.jsonl", old)
    view = read_view(run)
    assert (view.state, view.step, view.plan) == ("done", 3, "banana=2")
    assert [worker.name for worker in view.strips.workers] == ["rank 0"]
    assert view.curves.time == [1.0, 2.0, 3.0]


def test_what_is_gone_or_cannot_be_read_is_said_in_words(tmp_path: Path) -> None:
    assert read_view(tmp_path / "gone").state == "unreadable"
    assert "is gone" in read_view(tmp_path / "gone").problems[0]
    (tmp_path / "empty").mkdir()
    assert read_view(tmp_path / "empty").state == "queued"
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl cannot be read" in read_view(run).problems[0]
    (run / "run.json").write_text("[]")
    assert read_view(run).state == "unreadable"


def test_a_directory_that_goes_while_it_is_watched(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    reader = RunReader(run)
    assert reader.look().step == 50
    shutil.rmtree(run)
    view = reader.look()
    assert view.state == "unreadable" and "is gone" in view.reason and not view.curves.step


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "events.jsonl", "spent.jsonl", "outcome.json"]
)
def test_no_change_of_a_file_makes_it_raise(tmp_path: Path, name: str) -> None:
    run, draw = make_run(tmp_path / "run", steps=8), random.Random(name)
    write_lines(run / "events.jsonl", loss_of_rank(1, 4), "a")
    use = {"event": "host-use", "time": BEGAN, "host": 0, "cpu_percent": 3.0, "memory_bytes": 5}
    saved = {"event": "saved", "time": BEGAN, "step": 4, "name": "step-00000004", "bytes": 5}
    write_lines(run / "events.jsonl", [use, saved], "a")
    outcome = {"staleness": {"histogram": {"0": 3}}, "predicted": {"step_s": 0.1}}
    (run / "outcome.json").write_text(json.dumps(outcome))
    content = (run / name).read_bytes()
    for _ in range(60):
        (run / name).write_bytes(mutated(content, draw))
        encoded = msgspec.json.encode(read_view(run))
        assert len(encoded) < 1 << 20


def test_every_member_has_the_time_that_it_tells_of(tmp_path: Path) -> None:
    """Under servers that are not waited for, say: no rank is drawn as another one was."""
    run = make_run(tmp_path / "run", ranks=1)
    seats = [{"event": "seat", "rank": 1, "pid": 8}, {"event": "seat", "rank": 2, "server": 0}]
    spent = {"event": "spent", "since_s": 1.0, "time": BEGAN + 1, "steps": 5}
    lines = [
        spent | {"rank": 1, "data": 0.5, "compute": 0.25},
        spent | {"rank": 1, "time": BEGAN + 2, "compute": 1.0},
        spent | {"rank": 2, "server": 0, "steps": 0, "compute": 0.25, "waiting": 0.75},
        spent | {"rank": 10**6},  # as no run has
    ]
    write_lines(run / "events.jsonl", seats, "a")
    write_lines(run / "spent.jsonl", lines, "a")
    view = read_view(run)
    ours, slow, server = view.strips.workers
    assert (ours.name, slow.name, server.name) == ("rank 0", "rank 1", "server 0")
    assert slow.totals == {"data": 0.5, "compute": 1.25, "exchange": 0.0, "waiting": 0.0}
    first, last = len(slow.shares["data"]) // 4, -5
    assert [ord(slow.shares[kind][first]) - 48 for kind in ("data", "compute")] == [32, 16]
    assert [ord(slow.shares[kind][last]) - 48 for kind in ("data", "compute")] == [0, 64]
    assert server.is_server and server.totals["waiting"] == 0.75
    assert view.totals.slowest == "rank 1" and view.totals.slowest_times > 10
    means = [(ours.totals[kind] + slow.totals[kind]) for kind in ours.totals]
    found = [view.totals.seconds[kind] for kind in ours.totals]
    assert [one / sum(found) for one in found] == pytest.approx(
        [one / sum(means) for one in means], abs=1e-3
    )


def test_what_members_tell_of_their_time_stays_bounded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spent = {"event": "spent", "rank": 1, "since_s": 1.0, "steps": 1, "compute": 1.0}
    told = 20 * history.MOST_SPENT
    write_lines(run / "spent.jsonl", (spent | {"time": BEGAN + 2 + i} for i in range(told)), "a")
    reader = RunReader(run)
    view = reader.look()
    assert view.strips.workers[1].totals["compute"] == pytest.approx(told, rel=0.01)
    assert len(reader._history.seats["rank 1"].spent) <= history.MOST_SPENT


def test_what_is_shown_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3000, ranks=64)
    view = read_view(run)
    cells = len(view.strips.workers) * len(view.strips.begin)
    assert len(view.strips.workers) == 64 and cells <= MOST_CELLS
    assert len(view.curves.step) <= 1024 and len(msgspec.json.encode(view)) < 500_000


def test_events_and_hosts_stay_bounded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines: list[dict[str, Any]] = [
        {"event": "save-failed", "time": BEGAN + i, "step": i, "why": str(i)} for i in range(2000)
    ]
    lines += [
        {"event": "host-use", "time": BEGAN + i, "host": 0, "cpu_percent": float(i % 100)}
        for i in range(5000)
    ]
    write_lines(run / "events.jsonl", lines, "a")
    view = read_view(run)
    assert view.num_incidents == 2000 and len(view.incidents) == 400
    (host,) = view.hosts
    assert 200 < len(host.time) <= 512 and len(host.figures["cpu_percent"]) == len(host.time)


def test_checkpoints_have_the_command_that_goes_on_from_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a run")
    saved = {"event": "saved", "time": BEGAN, "bytes": 9, "ms": 1.0}
    names = {step: f"step-{step:08d}" for step in (10, 20, 30)}
    write_lines(
        run / "events.jsonl", [saved | {"step": s, "name": n} for s, n in names.items()], "a"
    )
    for step in (20, 30):
        (run / "checkpoints" / names[step]).mkdir(parents=True)
    newest, older, gone = read_view(run).checkpoints
    assert newest.resume.endswith(f"--resume --run-dir '{run}'")
    assert older.resume.endswith("step-00000020' --take everything")
    assert not gone.is_there and gone.resume == ""


def test_waiting_ever_longer_is_one_incident(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    waits = {"event": "waiting", "rank": 1, "step": 5, "samples": "0 to 9"}
    lines = [waits | {"time": BEGAN + s, "seconds": s} for s in (10, 20, 40)]
    write_lines(run / "events.jsonl", lines, "a")
    (incident,) = read_view(run).incidents
    assert incident.lost_s == 40 and incident.what == "rank 1 waited for samples for 40 s"


def test_a_stopped_and_a_failed_run_say_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=50, made=10)
    view = read_view(run)
    assert view.state == "failed" and view.num_incidents == 1
    assert (view.incidents[0].step, view.incidents[0].cause) == (10, view.reason)
    write_lines(
        run / "events.jsonl", [{"event": "stopping", "time": BEGAN, "signal": "SIGINT"}], "a"
    )
    assert read_view(run).state == "stopped" and "SIGINT" in read_view(run).reason
    write_lines(run / "events.jsonl", event_lines(2), "a")  # gone on with
    gave_up = {"event": "gave-up", "time": BEGAN, "cause": "rank 1 failed", "step": 3}
    write_lines(run / "events.jsonl", [gave_up], "a")
    assert read_view(run).reason == "rank 1 failed"
