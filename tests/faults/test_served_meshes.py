"""Workers of servers that are meshes: saves that other plans go on from, deaths, stops, deadlines.

The ranks of a replica need one another: whoever dies, all begin again from the newest checkpoint.
"""

import os
import signal

import pytest

from shoal.events.metrics_writer import last_recorded_step
from tests.support.faults import check_ledger, check_same

NUM_STEPS = 60
REPLICAS = "data=4 replicas=2 sync=server servers=2"
STAGES = "data=2 pipeline=2 microbatches=2 sync=server servers=2"
PATIENT = ("--heartbeat-timeout", "120")


@pytest.mark.parametrize(
    ("plan", "then", "whole"),
    [
        (REPLICAS, "data=4", "data=4"),
        ("data=4", REPLICAS, "data=4"),
        pytest.param(STAGES, "data=2 accumulate=2", "data=4", marks=pytest.mark.full),
        pytest.param("data=2 accumulate=2", STAGES.replace("servers=2", "servers=4"), "data=4"),
        pytest.param(
            f"{REPLICAS} local_steps=4 deadline=300",
            "data=4 replicas=2 local_steps=4",
            "",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_run_goes_on_under_another_plan(
    start, undisturbed_under, plan: str, then: str, whole: str
) -> None:
    training = start(pause=0.02, plan=plan)
    training.wait_for_step(5)
    os.kill(training.command.pid, signal.SIGTERM)
    stopped = training.wait()
    assert stopped.exit_code == 75, stopped.errors
    trained = start(plan=then, options=("--resume",), run_dir=stopped.run_dir, pause=0.02).wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    if whole:
        assert trained.model() == undisturbed_under(whole).model()


@pytest.mark.parametrize(
    ("plan", "armed"),
    [
        (REPLICAS, "step.computed:kill:member=1:step=25"),
        pytest.param(STAGES, "step.exchanged:kill:member=2:step=25", marks=pytest.mark.full),
        pytest.param(STAGES, "server.applied:kill:member=5:step=25", marks=pytest.mark.full),
        (REPLICAS, "server.push:kill:member=4:step=25"),
    ],
)
def test_whoever_dies_all_begin_again_from_the_checkpoint(start, plan: str, armed: str) -> None:
    settings = {"recipe": "judged", "plan": plan, "save": 8}
    whole = start(**settings, pause=0.0).wait()
    trained = start(armed, **settings, pause=0.01).wait()
    assert trained.exit_code == 0, trained.errors
    check_same(trained, whole)
    check_ledger(trained, NUM_STEPS)
    assert any("was ended, since" in event["how"] for event in trained.events("exited"))


@pytest.mark.parametrize("plan", [f"{REPLICAS} staleness=any", f"{STAGES} staleness=2"])
def test_out_of_lockstep_all_stop_after_the_same_step(start, plan: str) -> None:
    training = start(pause=0.02, plan=plan)
    training.wait_for_step(5)
    os.kill(training.command.pid, signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 75, trained.errors
    assert trained.result["checkpoint"] == trained.result["steps"] < NUM_STEPS
    again = start(plan="data=4", options=("--resume",), run_dir=trained.run_dir, pause=0.02).wait()
    assert again.exit_code == 0 and again.result["steps"] == NUM_STEPS, again.errors


@pytest.mark.parametrize("plan", [REPLICAS, STAGES])
def test_with_a_deadline_the_others_go_on(start, undisturbed_under, plan: str) -> None:
    """Rank 3 is of the second replica, the last of its two ranks."""
    windows = "local_steps=4 outer=nesterov:0.7:0.5"
    plain = undisturbed_under(f"{plan} {windows}", "stateless")
    in_time = start(plan=f"{plan} {windows} deadline=300", recipe="stateless", pause=0).wait()
    assert in_time.exit_code == 0, in_time.errors
    assert in_time.model() == plain.model()
    training = start(plan=f"{plan} {windows} deadline=1", options=PATIENT, pause=0.01)
    training.wait_for_step(5)
    training.signal_rank(3, signal.SIGSTOP)
    training.wait_for_step(last_recorded_step(training.run_dir / "metrics.jsonl") + 12)
    training.signal_rank(3, signal.SIGCONT)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    rounds = trained.result["rounds"]
    assert rounds["closed"] == NUM_STEPS // 4 and rounds["early"] >= 2
    assert 2 <= rounds["late"][1] < rounds["closed"] and not rounds["late"][0]
