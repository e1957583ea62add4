"""Two hosts with two ranks each, which add up by host: deaths, stops and cuts.

Hosts are network namespaces on a switch; a command in the place of ssh enters them. Ranks of unlike
networks share no memory, so what they exchange crosses the switch.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.faults.conftest import RECIPE
from tests.support.faults import Training, check_ledger, check_over_hosts, start_on_hosts
from tests.support.hosts import Host, NoNamespaces, several_hosts

pytestmark = pytest.mark.timeout(240)  # each also trains what it compares with
NUM_STEPS = 60
Begin = Callable[..., Training]


@pytest.fixture
def cable() -> Iterator[list[Host]]:
    with ExitStack() as made:
        try:
            yield made.enter_context(several_hosts(2))
        except NoNamespaces as why:
            pytest.skip(f"needs network namespaces: {why}")


@pytest.fixture
def begin(pool: Pool, tmp_path: Path, cable: list[Host]) -> Begin:
    def start(plan: str, recipe: str = "judged", **settings: object) -> Training:
        return start_on_hosts(
            pool,
            f"{RECIPE}:{recipe}",
            tmp_path / "run",
            cable,
            plan=plan,
            settings=settings,
            slots=2,
        )

    return start


@pytest.mark.parametrize(
    ("plan", "number"),
    [
        ("data=4", signal.SIGKILL),
        pytest.param("data=4", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("data=4 sums=ring", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("data=4 zero=2", signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_a_rank_is_lost(begin: Begin, undisturbed_under, plan: str, number: int) -> None:
    """All leave the collective, the seat is filled, the bits are the same."""
    training = begin(plan, pause=0.05, save=8)
    training.wait_for_step(10)
    training.signal_rank(3, number)
    trained = training.wait(100.0)
    if "ring" in plan:
        assert trained.exit_code == 0, trained.errors
        check_ledger(trained, NUM_STEPS)
    else:
        check_over_hosts(trained, undisturbed_under(plan, "judged"), NUM_STEPS)
    assert trained.result["recoveries"] >= 1
    hosts = {event["rank"]: event["host"] for event in trained.events("seat")}
    assert hosts == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.full
def test_a_host_is_cut_off(begin: Begin, cable: list[Host], undisturbed_under) -> None:
    """Two ranks go on in memory alone."""
    training = begin("data=4", pause=0.05, save=8)
    training.wait_for_step(10)
    cable[1].unplug()
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=4", "judged"), NUM_STEPS)
    assert [event["change"] for event in trained.events("resized")] == ["data 4 -> 2"]


@pytest.mark.full
def test_connections_are_reset(begin: Begin, cable: list[Host], undisturbed_under) -> None:
    training = begin("data=4", pause=0.05, save=8)
    for step in (8, 20, 32):
        training.wait_for_step(step)
        assert cable[1].reset_connections()
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=4", "judged"), NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("exited")
