"""Rounds that close at a deadline: the others go on without who stands still, and nothing is lost.

Members 0 to 2 are the replicas, 3 and 4 the servers, and 5 the spare; windows are of four steps.
Nobody is to be taken for dead here, so the bound on silence is long.
"""

import os
import signal
import time

import pytest

from shoal.events.metrics_writer import last_recorded_step
from tests.support.faults import Trained, check_ledger, check_survivors

NUM_STEPS = 60
SERVED = "data=3 sync=server servers=2 local_steps=4 outer=nesterov:0.7:0.5"
PLAN = f"{SERVED} deadline=1"
PATIENT = ("--heartbeat-timeout", "120")


def check_whole(trained: Trained) -> None:
    """It ended well, and each sample counts once in what replicas agreed on."""
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    assert trained.result["rounds"]["closed"] == NUM_STEPS // 4


def test_as_long_as_nobody_is_late_it_is_the_plan_without(start, undisturbed_under) -> None:
    plain = undisturbed_under(SERVED, "stateless")
    trained = start(plan=f"{SERVED} deadline=300", recipe="stateless", pause=0).wait()
    check_whole(trained)
    assert trained.model() == plain.model()
    assert trained.result["rounds"] == {"closed": 15, "early": 0, "late": [0, 0, 0]}


@pytest.mark.parametrize("plan", [PLAN, pytest.param(f"{PLAN} codec=int8", marks=pytest.mark.full)])
def test_the_others_go_on_and_the_woken_one_takes_part_again(start, plan: str) -> None:
    training = start(plan=plan, options=PATIENT, pause=0.01)
    training.wait_for_step(5)
    training.signal_rank(1, signal.SIGSTOP)
    training.wait_for_step(last_recorded_step(training.run_dir / "metrics.jsonl") + 12)
    training.signal_rank(1, signal.SIGCONT)
    trained = training.wait()
    check_whole(trained)
    check_survivors(trained, [])
    rounds = trained.result["rounds"]
    assert 2 <= rounds["late"][1] < rounds["closed"]
    assert rounds["early"] >= 2
    assert "closed early; late: " in trained.errors


@pytest.mark.full
def test_a_save_waits_for_all(start) -> None:
    settings = {"plan": PLAN, "recipe": "judged", "save": 16, "options": PATIENT}
    training = start(**settings, pause=0.01)
    training.wait_for_step(5)
    training.signal_rank(1, signal.SIGSTOP)
    training.wait_for_step(15)
    time.sleep(3.0)
    assert last_recorded_step(training.run_dir / "metrics.jsonl") <= 16
    training.signal_rank(1, signal.SIGCONT)
    trained = training.wait()
    check_whole(trained)
    assert {event["step"] for event in trained.events("saved")} >= {16, 32, 48, 60}


@pytest.mark.full
def test_who_dies_late_leaves_its_windows_to_the_newcomer(start) -> None:
    training = start(plan=PLAN, options=PATIENT, pause=0.01)
    training.wait_for_step(5)
    training.signal_rank(1, signal.SIGSTOP)
    training.wait_for_step(last_recorded_step(training.run_dir / "metrics.jsonl") + 8)
    training.signal_rank(1, signal.SIGKILL)
    trained = training.wait()
    check_whole(trained)
    check_survivors(trained, [1])


@pytest.mark.parametrize(
    "armed",
    [
        "server.decided:kill:member=3:step=5",
        pytest.param("server.applied:kill:member=3:step=5", marks=pytest.mark.full),
        pytest.param("server.applied:kill:member=4:step=5", marks=pytest.mark.full),
        pytest.param("step.exchanged:kill:member=1:step=23", marks=pytest.mark.full),
        pytest.param("step.committed:kill:member=2:step=24", marks=pytest.mark.full),
    ],
)
def test_a_death_around_a_decision(start, armed: str) -> None:
    trained = start(armed, plan=PLAN).wait()
    check_whole(trained)
    assert trained.result["recoveries"] == 1


@pytest.mark.full
def test_a_stop_is_at_the_end_of_a_round_that_all_are_in(start) -> None:
    training = start(pause=0.02, plan=PLAN)
    training.wait_for_step(5)
    os.kill(training.command.pid, signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 75, trained.errors
    step = trained.result["checkpoint"]
    assert step == trained.result["steps"] < NUM_STEPS and step % 4 == 0
    again = start(plan=PLAN, options=("--resume",), run_dir=trained.run_dir).wait()
    assert again.exit_code == 0 and again.result["steps"] == NUM_STEPS, again.errors
