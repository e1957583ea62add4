"""Hosts that are cut off from the others, one way and both ways, killed, slow, and back again;
connections that break, and clocks that differ, jump and stand still.

Three hosts are network namespaces on a switch; a command in the place of ssh enters them. A host
that was cut off has ended its members by itself, commits nothing, and joins again as a new one.
"""

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.faults.conftest import RECIPE
from tests.support.faults import (
    Trained,
    Training,
    check_over_hosts,
    pids_on,
    start_on_hosts,
    wait_for,
)
from tests.support.hosts import Host, NoNamespaces, before_others, several_hosts
from tests.support.leaks import is_alive, wait_until

NUM_STEPS = 60
WALL_CLOCKS = {  # what all processes of the run execute when they start
    "jumps": "import random, time\nnow = time.time\n"
    "time.time = lambda: now() + random.choice([-3e7, 0.0, 3e7])\n",
    "stands still": "import time\ntime.time = lambda: 1.7e9\n",
}
Begin = Callable[..., Training]
pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


@pytest.fixture
def cable() -> Iterator[list[Host]]:
    with ExitStack() as made:
        try:
            yield made.enter_context(several_hosts(3))
        except NoNamespaces as why:
            pytest.skip(f"needs network namespaces: {why}")


@pytest.fixture
def begin(pool: Pool, tmp_path: Path, cable: list[Host]) -> Begin:
    """Start the tiny run on three hosts, each with room for a rank or two."""

    def start(
        plan: str,
        *options: str,
        slots: int = 1,
        ahead_s: int = 0,
        environment: dict[str, str] | None = None,
        **settings: object,
    ) -> Training:
        return start_on_hosts(
            pool,
            f"{RECIPE}:judged",
            tmp_path / "run",
            cable,
            plan=plan,
            settings={"pause": 0.1, "save": 8} | settings,
            options=options,
            slots=slots,
            ahead_s=ahead_s,
            environment=environment,
        )

    return start


def remove_left_behind() -> None:
    """What the agent of a host has that was killed whole: nothing was left there to remove it."""
    for left in Path(tempfile.gettempdir()).glob("shoal-agent-*"):
        shutil.rmtree(left)


def check_fenced(trained: Trained, host: Host) -> None:
    """The host has no seat under its number after its loss, whatever became of it."""
    (told,) = (e for e in trained.events("host-lost") if host.address in e["how"])
    lost = told["host"]
    later = [e for e in trained.events("seat") if e["time"] > told["time"]]
    assert later and lost not in {event["host"] for event in later}


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ("data=3", ["data 3 -> 2", "data 2 -> 3"]),
        ("data=6 sync=server servers=3 copies=2", ["data 6 -> 4", "data 4 -> 6"]),
    ],
)
def test_a_host_that_is_unplugged_and_comes_back(
    begin: Begin, cable: list[Host], undisturbed_under, plan: str, changes: list[str]
) -> None:
    training = begin(plan, pause=0.3, slots=2 if "server" in plan else 1)
    training.wait_for_step(5)
    pids = pids_on(training, cable[2])
    cable[2].unplug()
    wait_for(training, "resized")
    assert wait_until(lambda: not any(map(is_alive, pids)), 20.0), "it did not end its members"
    cable[2].plug()
    wait_for(training, "resized", 2)
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under(plan, "judged"), NUM_STEPS)
    check_fenced(trained, cable[2])
    assert [event["change"] for event in trained.events("resized")] == changes
    assert trained.result["steps_again"] == 0
    assert trained.events("host-added")[0]["host"] == 3


@pytest.mark.parametrize("deaf", [True, False], ids=["it hears nothing", "it is not heard"])
def test_a_link_that_is_cut_one_way(
    begin: Begin, cable: list[Host], undisturbed_under, deaf: bool
) -> None:
    training = begin("data=3")
    training.wait_for_step(8)
    pids = pids_on(training, cable[2])
    source, target = (cable[0], cable[2]) if deaf else (cable[2], cable[0])
    source.silence_towards(target)
    wait_for(training, "resized")
    assert wait_until(lambda: not any(map(is_alive, pids)), 20.0), "it did not end its members"
    source.speak_to(target)
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)
    check_fenced(trained, cable[2])


@pytest.mark.parametrize(
    "plan", ["data=3", "data=3 zero=2", "data=6 sync=server servers=3 copies=2"]
)
def test_a_host_that_is_killed(
    begin: Begin, cable: list[Host], undisturbed_under, plan: str
) -> None:
    """All processes that are in its network at once."""
    training = begin(plan, slots=2 if "server" in plan else 1)
    training.wait_for_step(10)
    cable[2].signal(signal.SIGKILL)
    trained = training.wait(100.0)
    remove_left_behind()
    check_over_hosts(trained, undisturbed_under(plan, "judged"), NUM_STEPS)
    check_fenced(trained, cable[2])


def test_connections_of_which_one_end_is_gone(
    begin: Begin, cable: list[Host], undisturbed_under
) -> None:
    """A host whose power fails says no goodbye: what the others have of it stays open."""
    training = begin("data=3", pause=0.3)
    training.wait_for_step(8)
    cable[2].unplug()
    cable[2].signal(signal.SIGKILL)
    wait_for(training, "resized")
    cable[2].plug()
    trained = training.wait(100.0)
    remove_left_behind()
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)
    check_fenced(trained, cable[2])


def test_two_groups_of_which_one_goes_on(
    begin: Begin, cable: list[Host], undisturbed_under
) -> None:
    """The larger one is without the first host, and commits nothing for all its size."""
    training = begin("data=3", pause=0.3)
    training.wait_for_step(8)
    pids = pids_on(training, cable[1]) + pids_on(training, cable[2])
    cable[0].unplug()  # b and c still reach each other
    wait_for(training, "resized")
    assert wait_until(lambda: not any(map(is_alive, pids)), 20.0), "they did not end their members"
    cable[0].plug()
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)
    for host in cable[1:]:
        check_fenced(trained, host)
    assert trained.events("resized")[0]["change"] == "data 3 -> 1"


def test_two_hosts_that_lose_each_other_alone(
    begin: Begin, cable: list[Host], undisturbed_under
) -> None:
    """The first host reaches both."""
    training = begin("data=3", pause=0.3)
    training.wait_for_step(8)
    cable[1].silence_towards(cable[2])
    time.sleep(8.0)
    cable[1].speak_to(cable[2])
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)


def test_a_link_that_is_slow(begin: Begin, cable: list[Host], undisturbed_under) -> None:
    training = begin("data=3 sync=server servers=2 copies=2", slots=2)
    training.wait_for_step(8)
    cable[2].narrow("400kbit")
    trained = training.wait(100.0)
    check_over_hosts(
        trained, undisturbed_under("data=3 sync=server servers=2 copies=2", "judged"), NUM_STEPS
    )
    assert not trained.events("host-lost") and not trained.events("exited")


def test_a_host_that_is_slow_is_not_lost(
    begin: Begin, cable: list[Host], undisturbed_under
) -> None:
    training = begin("data=3")
    training.wait_for_step(8)
    for _ in range(3):
        cable[1].unplug()
        time.sleep(1.0)
        cable[1].plug()
        time.sleep(1.0)
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("resized")


def test_processes_that_all_stand_still(begin: Begin, cable: list[Host], undisturbed_under) -> None:
    """For longer than the limit of silence, as a machine does that is put to sleep."""
    training = begin("data=3")
    training.wait_for_step(8)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for host in cable:
            host.signal(number)
        time.sleep(5.0 * (number == signal.SIGSTOP))
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("exited")


@pytest.mark.parametrize("plan", ["data=3", "data=3 sync=server servers=2 copies=2"])
@pytest.mark.parametrize("how", ["jumps", "stands still"])
def test_a_wall_clock_that_no_one_should_trust(
    begin: Begin, cable: list[Host], tmp_path: Path, undisturbed_under, how: str, plan: str
) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(WALL_CLOCKS[how])
    training = begin(plan, slots=2, environment={"PYTHONPATH": before_others(tmp_path / "clock")})
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under(plan, "judged"), NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("exited")


@pytest.mark.parametrize(
    "plan", ["data=3", "data=3 zero=2", "data=3 sync=server servers=2 copies=2"]
)
def test_connections_that_are_reset(
    begin: Begin, cable: list[Host], undisturbed_under, plan: str
) -> None:
    """Nobody died: what was on its way is sent again, and counts once. Members stay; those of a
    plan that can only begin again from its checkpoint may be started anew, if it met a step."""
    training = begin(plan, slots=2)
    for step in (8, 20, 32):
        training.wait_for_step(step)
        assert cable[2].reset_connections()
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under(plan, "judged"), NUM_STEPS)
    assert not trained.events("host-lost")
    if "zero" not in plan:
        assert not trained.events("exited")


def test_clocks_that_differ(begin: Begin, cable: list[Host], undisturbed_under) -> None:
    """Monotonic clocks begin when a machine does: no time of one is compared with another's."""
    training = begin("data=3", ahead_s=1_000_000)
    training.wait_for_step(8)
    cable[1].unplug()
    time.sleep(1.0)
    cable[1].plug()
    trained = training.wait(100.0)
    check_over_hosts(trained, undisturbed_under("data=3", "judged"), NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("resized")
