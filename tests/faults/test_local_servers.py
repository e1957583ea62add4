"""Deaths between two agreements of local steps: servers hold what was agreed, so one is replaced.

The others keep what they have learnt, and each sample still counts once. Members 0 to 2 are the
replicas, 3 and 4 the servers, and 5 the spare; windows are of four steps.
"""

import os
import random
import signal
import time

import pytest

from tests.support.faults import Trained, check_ledger, check_recovered, check_same, check_survivors

NUM_STEPS = 60
PLAN = "data=3 sync=server servers=2 local_steps=4 outer=nesterov:0.7:0.5"
POINTS = ["step.begin", "step.computed", "step.exchanged", "step.committed"]
QUICK = {("step.computed", 22, 1), ("step.exchanged", 23, 0), ("step.committed", 24, 2)}


def check_whole(trained: Trained) -> None:
    """It ended well, and all steps are made of the samples that the order gives them."""
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    assert not list((trained.run_dir / "servers").glob("*")), "a journal was left"


@pytest.mark.quick("step.computed-22-1")
@pytest.mark.parametrize(
    ("point", "step", "rank"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
        for case in (
            (point, step, rank) for point in POINTS for step in (22, 23, 24) for rank in range(3)
        )
    ],
)
def test_a_replica_killed_within_a_window(start, point: str, step: int, rank: int) -> None:
    trained = start(f"{point}:kill:member={rank}:step={step}", plan=PLAN).wait()
    check_whole(trained)
    check_survivors(trained, [rank])
    check_recovered(trained, {rank: "killed by SIGKILL"})
    assert f"Replica {rank} continues from step" in trained.errors


@pytest.mark.quick("server.applied")
@pytest.mark.parametrize("point", ["server.push", "server.applied"])
def test_a_server_killed_while_a_window_ends(start, point: str) -> None:
    whole = start(plan=PLAN).wait()
    trained = start(f"{point}:kill:member=4:step=5", plan=PLAN).wait()
    check_whole(trained)
    check_same(trained, whole)
    check_survivors(trained, [4])


@pytest.mark.quick("staleness=1")
@pytest.mark.parametrize("bound", ["staleness=any", "staleness=1"])
def test_out_of_lockstep_the_others_go_on(start, bound: str) -> None:
    trained = start("step.computed:kill:member=1:step=22", plan=f"{PLAN} {bound}").wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.result["recoveries"] == 1
    assert [record["step"] for record in trained.steps()] == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("data=3 local_steps=4", marks=pytest.mark.full),
        PLAN,
        pytest.param(f"{PLAN} staleness=any", marks=pytest.mark.full),
    ],
)
def test_a_stop_is_at_the_end_of_a_window(start, plan: str) -> None:
    training = start(pause=0.02, plan=plan)
    training.wait_for_step(5)
    os.kill(training.command.pid, signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 75, trained.errors
    step = trained.result["checkpoint"]
    assert step == trained.result["steps"] < NUM_STEPS and step % 4 == 0
    again = start(plan=PLAN, options=("--resume",), run_dir=trained.run_dir).wait()
    assert again.exit_code == 0 and again.result["steps"] == NUM_STEPS, again.errors


@pytest.mark.full
@pytest.mark.parametrize("num_kills", [1, 40])
@pytest.mark.timeout(900)
def test_kills_at_random_moments(start, draws: random.Random, num_kills: int) -> None:
    for attempt in range(num_kills):
        training = start(pause=0.01, plan=PLAN)
        training.wait_for_seats()
        time.sleep(draws.uniform(0.0, 0.5))
        training.signal_rank(draws.randrange(5), signal.SIGKILL)
        check_whole(trained := training.wait())
        assert trained.result["recoveries"] == 1, f"kill {attempt}"
