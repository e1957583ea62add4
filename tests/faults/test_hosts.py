"""Deaths where each host has a server that adds up for it: the bits are those without any.

Members 0 to 3 are the workers, 4 the server of the plan, 5 and 6 those of the hosts.
"""

import pytest

from tests.support.faults import Trained, check_ledger, check_same, check_survivors

NUM_STEPS = 60
TWO_LEVELS = "data=4 sync=server hosts=2"


@pytest.fixture
def alone(undisturbed_under) -> Trained:
    return undisturbed_under("data=4")


@pytest.mark.quick("host.applied-5")
@pytest.mark.parametrize(
    ("point", "member"),
    [
        ("host.applied", 5),
        ("host.apply", 6),
        pytest.param("server.push", 6, marks=pytest.mark.full),
        pytest.param("server.pull", 5, marks=pytest.mark.full),
        ("server.applied", 4),
        pytest.param("server.unwritten", 4, marks=pytest.mark.full),
        pytest.param("step.computed", 3, marks=pytest.mark.full),
        pytest.param("step.committed", 0, marks=pytest.mark.full),
    ],
)
def test_a_kill_within_a_step(start, alone: Trained, point: str, member: int) -> None:
    trained = start(f"{point}:kill:member={member}:step=20", plan=TWO_LEVELS).wait()
    assert trained.exit_code == 0, trained.errors
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, [member])


@pytest.mark.full
def test_a_host_that_is_lost_whole(start, alone: Trained) -> None:
    """Its workers and its server at once."""
    armed = [f"step.exchanged:kill:member={rank}:step=20" for rank in (2, 3)]
    trained = start("host.apply:kill:member=6:step=20", *armed, plan=TWO_LEVELS).wait()
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)
