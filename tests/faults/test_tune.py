"""A study whose driver, trials and ranks are killed: nothing is run twice, and nothing is left."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from shoal.events.metrics_writer import last_recorded_step
from shoal.testing.ranks import Command, Pool
from tests.support.faults import events, read_lines
from tests.support.hosts import run_in
from tests.support.leaks import descendants, is_alive, wait_until

pytest.importorskip("optuna")
RECIPE = f"{Path(__file__).with_name('tiny.py')}:judged"
LIMIT_S = 240.0  # a busy machine may take long; none is judged by it
pytestmark = pytest.mark.timeout(300)
NUM_STEPS = 60


class Studying(NamedTuple):
    """A `shoal tune` under way."""

    command: Command
    directory: Path

    def run_dir(self, number: int) -> Path:
        return self.directory / "study" / "trials" / f"{number:04d}"

    def wait_for_step(self, number: int, step: int) -> None:
        metrics = self.run_dir(number) / "metrics.jsonl"
        assert wait_until(lambda: last_recorded_step(metrics) >= step, LIMIT_S), self.said()

    def said(self) -> str:
        return (self.directory / "err").read_text()

    def end(self) -> tuple[int, dict[str, Any]]:
        code = self.command.wait(LIMIT_S)
        lines = (self.directory / "out").read_text().splitlines()
        return code, msgspec.json.decode(lines[-1]) if lines else {}


Start = Callable[..., Studying]


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Start:
    """Start or go on with a study of the tiny run: two trials side by side, of three."""

    def run(*words: str, pause: float = 0.02, save: int = 8, trials: int = 3) -> Studying:
        given = ("tune", RECIPE, "--space", "seed=int:1..100 clip=0.5|1.0", "--parallel", "2")
        sets = ("--set", f"pause={pause}", "--set", f"save={save}")
        command = pool.start(
            run_in,
            "",
            [*given, *sets, "--trials", str(trials), "--run-dir", "study", "--json", *words],
            output=tmp_path / "out",
            errors=tmp_path / "err",
            directory=tmp_path,
        )
        return Studying(command, tmp_path)

    return run


def check_whole(study: Studying, found: dict[str, Any], num_trials: int = 3) -> None:
    """As many trials as asked for, each of which made every step once."""
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * num_trials, study.said()
    for trial in found["trials"]:
        steps = read_lines(study.directory / trial["run_dir"] / "metrics.jsonl")
        assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
        assert trial["value"] == steps[-1]["evaluation"]["loss"]


def check_gone(pids: set[int]) -> None:
    assert wait_until(lambda: not any(map(is_alive, pids)), 30.0), "a process was left"


@pytest.mark.parametrize("trials", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_driver_loses_nothing(start: Start, trials: int) -> None:
    """Its trials save themselves and end; the same command resumes them."""
    study = start(trials=trials)
    for number in range(trials):
        study.wait_for_step(number, 10)
    pids = descendants(study.command.pid)
    study.command.send_signal(signal.SIGKILL)
    study.command.wait(LIMIT_S)
    check_gone(pids)
    saved = [study.run_dir(number) for number in range(trials)]
    for run_dir in saved:
        assert events(run_dir, "stopping"), "it was not asked to stop"
        assert any((run_dir / "checkpoints").iterdir())
    again = start(trials=trials)
    code, found = again.end()
    assert code == 0, again.said()
    check_whole(again, found, trials)
    for run_dir in saved:
        (resumed,) = events(run_dir, "resumed")
        assert resumed["step"] >= 10


@pytest.mark.full
def test_a_driver_that_is_killed_again_and_again(start: Start) -> None:
    for step in (5, 20, 35, 50):
        study = start()
        study.wait_for_step(0, step)
        pids = descendants(study.command.pid)
        study.command.send_signal(signal.SIGKILL)
        study.command.wait(LIMIT_S)
        check_gone(pids)
    code, found = start().end()
    assert code == 0
    check_whole(study, found)


@pytest.mark.full
def test_a_killed_trial_is_resumed_from_its_checkpoint(start: Start) -> None:
    """Its supervisor first, then its rank: one is the study's to mend, the other the run's."""
    study = start(trials=2)
    study.wait_for_step(0, 20)
    supervisor = of_trial(study, 0)
    supervisor.kill()
    study.wait_for_step(1, 20)
    seat = events(study.run_dir(1), "seat")[-1]
    os.kill(seat["pid"], signal.SIGKILL)
    code, found = study.end()
    assert code == 0, study.said()
    check_whole(study, found, 2)
    assert "trial 0 lost, and resumed" in study.said()
    assert events(study.run_dir(0), "resumed")[0]["step"] >= 16
    assert events(study.run_dir(1), "recovered")


@pytest.mark.full
def test_a_trial_that_is_lost_again_and_again_fails(start: Start) -> None:
    study = start(trials=1)
    for count in (1, 2, 3):
        study.wait_for_step(0, 4)
        formed = partial(has_formed, study.run_dir(0), count)
        assert wait_until(formed, LIMIT_S)
        of_trial(study, 0).kill()
    code, found = study.end()
    assert code == 1
    (trial,) = found["trials"]
    assert trial["state"] == "failed" and "lost 3 times" in trial["reason"]


@pytest.mark.full
def test_the_process_that_ranks_are_forked_from_is_killed(start: Start) -> None:
    study = start(trials=1)
    study.wait_for_step(0, 20)
    (server,) = of_trial(study, 0).children()
    server.kill()
    code, found = study.end()
    assert code == 0, study.said()
    check_whole(study, found, 1)


@pytest.mark.full
def test_the_process_that_trials_are_forked_from_is_killed(start: Start) -> None:
    study = start()
    study.wait_for_step(0, 10)
    (server,) = psutil.Process(study.command.pid).children()
    pids = descendants(study.command.pid)
    server.kill()
    code, _ = study.end()
    assert code == 75 and "The same command goes on" in study.said()
    check_gone(pids)
    code, found = start().end()
    assert code == 0
    check_whole(study, found)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_study_and_the_same_command_goes_on(start: Start, number: int) -> None:
    study = start()
    study.wait_for_step(0, 10)
    study.wait_for_step(1, 10)
    study.command.send_signal(number)
    code, found = study.end()
    assert code == 75 == found["exit_code"], study.said()
    assert "The same command goes on" in study.said()
    assert [trial["state"] for trial in found["trials"]] == ["running", "running"]
    code, found = start().end()
    assert code == 0
    check_whole(study, found)
    assert all(events(study.run_dir(trial), "resumed") for trial in (0, 1))


@pytest.mark.full
def test_one_trial_is_paused_by_hand(start: Start, pool: Pool) -> None:
    study = start()
    study.wait_for_step(0, 10)
    said = study.directory / "stop"
    words = ["stop", str(study.run_dir(0))]
    stop = pool.start(run_in, "", words, output=said, errors=said, directory=study.directory)
    assert stop.wait(LIMIT_S) == 0
    code, found = study.end()
    assert code == 75 == found["exit_code"], study.said()
    states = [trial["state"] for trial in found["trials"]]
    assert states == ["running", "complete", "complete"], study.said()
    code, found = start().end()
    assert code == 0
    check_whole(study, found)
    assert events(study.run_dir(0), "resumed")


@pytest.mark.full
def test_a_second_signal_ends_at_once(start: Start) -> None:
    study = start(pause=0.5)
    study.wait_for_step(0, 1)
    study.command.send_signal(signal.SIGINT)
    assert wait_until(lambda: "stopping" in study.said(), LIMIT_S)
    study.command.send_signal(signal.SIGINT)
    code, _ = study.end()
    assert code == 130


@pytest.mark.full
def test_two_drivers_do_not_share_a_study(start: Start, pool: Pool) -> None:
    study = start()
    study.wait_for_step(0, 5)
    second = start()
    code = second.command.wait(LIMIT_S)
    assert code == 2
    assert "in use" in second.said()
    assert study.command.wait(LIMIT_S) == 0


def has_formed(run_dir: Path, count: int) -> bool:
    return len(events(run_dir, "formed")) >= count


def of_trial(study: Studying, number: int) -> psutil.Process:
    """The process that supervises a trial's run: the parent of the parent of its ranks."""
    seat = events(study.run_dir(number), "seat")[-1]
    return psutil.Process(seat["pid"]).parent().parent()
