"""Deaths while parameters are on their way, in frames: the step is committed, and stays so.

Members 0 to 2 are the workers, none of which is given memory to share, 3 and 4 the servers.
"""

import pytest

from tests.support.faults import Trained, check_ledger, check_same, check_survivors

NUM_STEPS = 30
LOCKSTEP = "data=3 sync=server servers=2"
FRAMES = [f"memory.share:full:member={member}" for member in range(3)]


@pytest.fixture
def alone(undisturbed_under) -> Trained:
    return undisturbed_under("data=3", "in_parts")


def check(trained: Trained, alone: Trained, replaced: list[int]) -> None:
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, replaced)
    assert len(trained.events("recovered")) == len(replaced), "nothing was fetched in frames"


def test_frames_change_nothing(start, alone: Trained) -> None:
    check(start(*FRAMES, plan=LOCKSTEP, recipe="in_parts").wait(), alone, [])


@pytest.mark.quick("data=3 sync=server servers=2-3")
@pytest.mark.parametrize(
    ("plan", "server"),
    [
        (LOCKSTEP, 3),
        pytest.param(LOCKSTEP, 4, marks=pytest.mark.full),
        (f"{LOCKSTEP} copies=2", 4),
        pytest.param(f"{LOCKSTEP} copies=2", 3, marks=pytest.mark.full),
    ],
)
def test_a_server_killed_before_all_has_left(start, alone: Trained, plan: str, server: int) -> None:
    """Its successor has the step, by the journal or from a copy."""
    armed = [*FRAMES, f"server.fetch:kill:member={server}:step=15"]
    check(start(*armed, plan=plan, recipe="in_parts").wait(), alone, [server])


@pytest.mark.full
def test_a_newcomer_copies_no_torn_parameters(start, alone: Trained) -> None:
    """A server and a worker die: the peers that the newcomer could copy are all torn."""
    armed = [*FRAMES, "server.fetch:kill:member=3:step=15", "step.begin:kill:member=0:step=15"]
    check(start(*armed, plan=LOCKSTEP, recipe="in_parts").wait(), alone, [0, 3])


def test_out_of_lockstep_it_goes_on(start) -> None:
    # Out of lockstep no worker need fetch one given version: the first that is fetched from 15 on.
    kills = [f"server.fetch:kill:member=3:step={version}" for version in range(15, 45)]
    trained = start(*FRAMES, *kills, plan=f"{LOCKSTEP} staleness=any", recipe="in_parts").wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.result["recoveries"] == 1
    assert [record["step"] for record in trained.steps()] == list(range(1, NUM_STEPS + 1))
