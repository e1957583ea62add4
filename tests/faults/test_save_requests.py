"""A run under way is saved when somebody asks for it, and trains the same bits as without."""

import pytest

from shoal.elastic.control import send_request
from shoal.errors import UsageError
from tests.faults.conftest import checkpoints
from tests.support.faults import check_ledger, check_same

NUM_STEPS = 60


def full(plan: str) -> object:
    return pytest.param(plan, marks=pytest.mark.full)


@pytest.mark.parametrize(
    "plan",
    [
        "data=3",
        full("data=3 zero=2"),
        full("data=3 memory=apart"),
        full("data=3 sync=server servers=2"),
    ],
)
def test_a_run_is_saved_when_somebody_asks(start, undisturbed, plan: str) -> None:
    training = start(pause=0.03, plan=plan)
    training.wait_for_step(5)
    names = [send_request(training.run_dir, save=True)["saved"] for _ in range(2)]
    trained = training.wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    steps = [int(name[-8:]) for name in names]
    assert 5 <= steps[0] < steps[1] < NUM_STEPS
    assert {step for step in steps if step % 20} <= {one["step"] for one in trained.events("saved")}
    assert checkpoints(trained.run_dir)[-1] == NUM_STEPS
    assert trained.result["recoveries"] == trained.result["steps_again"] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["data=2 sync=server staleness=2 pieces=2", "data=2 local_steps=4 pieces=2"]
)
def test_ranks_out_of_lockstep_meet_to_save(start, plan: str) -> None:
    training = start(pause=0.03, plan=plan)
    training.wait_for_step(5)
    send_request(training.run_dir, save=True)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    assert [one["step"] for one in trained.events("saved") if one["step"] % 20]


def test_a_run_that_is_over_is_not_saved(start) -> None:
    trained = start(plan="data=3").wait()
    with pytest.raises(UsageError, match="it is over"):
        send_request(trained.run_dir, save=True)
