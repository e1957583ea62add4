"""A rank that is lost between the phases of a step: the step goes on with the phase that is next,
and the bits are those of an undisturbed run."""

import signal

import pytest

from shoal.errors import RUN_AGAIN
from tests.support.faults import Trained, check_ledger, check_same

NUM_STEPS = 24


@pytest.fixture(scope="session")
def undisturbed_phases(undisturbed_under) -> Trained:
    return undisturbed_under("data=3", "in_phases")


def check(trained: Trained, undisturbed: Trained) -> None:
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    told = [record["parts"] for record in trained.steps()]
    assert told == [record["parts"] for record in undisturbed.steps()]
    assert all(parts.keys() == {"judges", "draws"} for parts in told)


@pytest.mark.parametrize(
    ("point", "rank", "step"),
    [
        ("phase.committed", 0, 8),
        pytest.param("phase.committed", 1, 0, marks=pytest.mark.full),
        pytest.param("step.exchanged", 2, 8, marks=pytest.mark.full),
        pytest.param("phase.committed", 2, NUM_STEPS - 1, marks=pytest.mark.full),
        pytest.param("step.computed", 1, 8, marks=pytest.mark.full),
        pytest.param("step.committed", 0, 8, marks=pytest.mark.full),
        pytest.param("step.begin", 0, 0, marks=pytest.mark.full),
    ],
)
def test_a_kill_within_a_step(start, undisturbed_phases, point: str, rank: int, step: int) -> None:
    trained = start(f"{point}:kill:member={rank}:step={step}", recipe="in_phases").wait()
    check(trained, undisturbed_phases)
    assert trained.result["recoveries"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "point", ["step.exchanged", pytest.param("phase.committed", marks=pytest.mark.full)]
)
def test_a_group_that_is_lost_costs_no_process(start, undisturbed_phases, point: str) -> None:
    """All survive: lost after the exchange, rank 1 is behind the others by a phase."""
    trained = start(f"{point}:lose:member=1:step=8", recipe="in_phases").wait()
    check(trained, undisturbed_phases)


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on(start, undisturbed_phases, tmp_path) -> None:
    place = tmp_path / "again"
    training = start(recipe="in_phases", run_dir=place, pause=0.02, save_every=5)
    training.wait_for_step(3)
    training.command.send_signal(signal.SIGTERM)
    stopped = training.wait()
    assert stopped.exit_code == RUN_AGAIN, stopped.errors
    trained = start(recipe="in_phases", run_dir=place, options=("--resume",)).wait()
    check(trained, undisturbed_phases)


@pytest.mark.full
def test_shards_go_on_from_a_checkpoint(start, undisturbed_under) -> None:
    plain = undisturbed_under("data=2 zero=1", "in_phases")
    trained = start(
        "phase.committed:kill:member=1:step=14",
        recipe="in_phases",
        plan="data=2 zero=1",
        save_every=6,
    ).wait()
    check_same(trained, plain)
