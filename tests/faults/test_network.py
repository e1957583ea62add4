"""Packets between hosts that are lost, doubled, late and damaged: the bits stay, each push counts
once, and no host is given up.

Everything goes through a switch of the test's own (`tests/support/network.py`). What TCP repairs
is for all connections; what it does not, a message that is damaged or that a reset has taken along,
is for those of ZeroMQ: Gloo has no answer to it but to form the group anew.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.faults.conftest import RECIPE
from tests.support.faults import Trained, Training, check_over_hosts, start_on_hosts
from tests.support.hosts import Host, NoNamespaces
from tests.support.network import (
    Network,
    Packet,
    Tamper,
    bad_network,
    damaged,
    doubled,
    is_message,
    late,
    lost,
    only,
    passed,
    sometimes,
)

NUM_STEPS = 60
PLANS = ["data=3", "data=3 sync=server servers=2 copies=2", "data=3 zero=2"]
PATIENCE_S = 150.0
Begin = Callable[[str], Training]
pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]
Undisturbed = Callable[..., Trained]


@pytest.fixture
def made() -> Iterator[tuple[list[Host], Network]]:
    with ExitStack() as held:
        try:
            yield held.enter_context(bad_network(3))
        except NoNamespaces as why:
            pytest.skip(f"needs network namespaces: {why}")


@pytest.fixture
def network(made: tuple[list[Host], Network]) -> Network:
    return made[1]


@pytest.fixture
def hosts(made: tuple[list[Host], Network]) -> list[Host]:
    return made[0]


@pytest.fixture
def begin(pool: Pool, tmp_path: Path, hosts: list[Host]) -> Begin:
    def start(plan: str) -> Training:
        settings = {"pause": 0.1, "save": 8}
        recipe, run_dir = f"{RECIPE}:judged", tmp_path / "run"
        return start_on_hosts(pool, recipe, run_dir, hosts, plan=plan, settings=settings, slots=2)

    return start


def check(trained: Trained, undisturbed: Trained) -> None:
    check_over_hosts(trained, undisturbed, NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("resized")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fault", [lost, doubled, late], ids=lambda fault: fault.__name__)
def test_packets_that_go_astray(
    begin: Begin,
    network: Network,
    draws: random.Random,
    undisturbed_under: Undisturbed,
    plan: str,
    fault: Tamper,
) -> None:
    """From the first packet on, and nobody even notices."""
    network.tamper = sometimes(0.02, fault, draws)
    trained = begin(plan).wait(PATIENCE_S)
    check(trained, undisturbed_under(plan, "judged"))
    assert network.num_tampered > 20
    assert not trained.events("exited") and trained.result["steps_again"] == 0


@pytest.mark.parametrize("plan", PLANS)
def test_messages_that_are_damaged(
    begin: Begin,
    network: Network,
    draws: random.Random,
    undisturbed_under: Undisturbed,
    plan: str,
) -> None:
    """What was changed on its way is refused, and sent again."""
    training = begin(plan)
    training.wait_for_step(5, PATIENCE_S)
    network.tamper = only(is_message, sometimes(0.02, damaged, draws))
    trained = training.wait(PATIENCE_S)
    check(trained, undisturbed_under(plan, "judged"))
    assert network.num_tampered > 5
    assert not trained.events("exited")


@pytest.mark.parametrize("plan", PLANS[:2])
@pytest.mark.parametrize("host", [0, 1], ids=["requests", "replies"])
def test_messages_that_a_reset_takes_along(
    begin: Begin,
    network: Network,
    hosts: list[Host],
    undisturbed_under: Undisturbed,
    plan: str,
    host: int,
) -> None:
    """They have left one side and never reach the other."""
    training = begin(plan)
    for step in (8, 20, 32):
        training.wait_for_step(step, PATIENCE_S)
        network.tamper = only(lambda packet: packet.source == host and is_message(packet), lost)
        time.sleep(0.3)
        hosts[1].reset_connections()
        network.tamper = passed
    trained = training.wait(PATIENCE_S)
    check(trained, undisturbed_under(plan, "judged"))
    assert not trained.events("exited")


@pytest.mark.parametrize("plan", PLANS[:2])
def test_messages_that_come_after_they_were_sent_again(
    begin: Begin, network: Network, undisturbed_under: Undisturbed, plan: str
) -> None:
    """Held up for longer than it takes to ask again, so that both arrive."""
    training = begin(plan)
    for step in (8, 20):
        training.wait_for_step(step, PATIENCE_S)
        ends_at = time.monotonic() + 1.5

        def hold(packet: Packet, ends_at: float = ends_at) -> list[tuple[float, Packet]]:
            return [(max(0.0, ends_at - time.monotonic()), packet)]

        network.tamper = only(is_message, hold)
        time.sleep(1.5)
        network.tamper = passed
    trained = training.wait(PATIENCE_S)
    check(trained, undisturbed_under(plan, "judged"))
    assert not trained.events("exited")
