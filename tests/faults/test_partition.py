"""Hosts that are cut off from the others, one way and both ways, killed, slow, and back again;
connections that break, and clocks that differ.

Three hosts are network namespaces on a switch; a command in the place of ssh enters them. A host
that was cut off has ended its members by itself, commits nothing, and joins again as a new one.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from shoal.faults import VARIABLE
from shoal.testing.ranks import Pool
from tests.faults.conftest import RECIPE
from tests.support.faults import Trained, Training, check_ledger, check_same, events
from tests.support.hosts import Host, NoNamespaces, run_in, several_hosts, write_ssh
from tests.support.leaks import is_alive, wait_until

NUM_STEPS = 60
Begin = Callable[..., Training]


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
        plan: str, *options: str, slots: int = 1, ahead_s: int = 0, **settings: object
    ) -> Training:
        hosts = {"b": cable[1], "c": cable[2]}
        ssh = write_ssh(tmp_path / "ssh", hosts, ahead_s=ahead_s)
        run_dir = tmp_path / "run"
        words = ["train", f"{RECIPE}:judged", "--plan", plan, "--run-dir", str(run_dir), "--json"]
        words += ["--on", "hosts:localhost,b,c", "--listen", cable[0].address, "--trust-network"]
        words += ["--slots", str(slots), "--heartbeat-timeout", "2", *options]
        for name, value in ({"pause": 0.1, "save": 8} | settings).items():
            words += ["--set", f"{name}={value}"]
        command = pool.start(
            run_in,
            cable[0].namespace,
            words,
            environment={VARIABLE: "", "SHOAL_SSH": ssh},
            output=tmp_path / "run.out",
            errors=tmp_path / "run.err",
            directory=tmp_path,
        )
        return Training(command, run_dir)

    return start


def wait_for(training: Training, kind: str, count: int = 1) -> None:
    came = wait_until(lambda: len(events(training.run_dir, kind)) >= count, 50.0)
    assert came, f"no {kind} came: {training.run_dir.with_suffix('.err').read_text()}"


def pids_on(training: Training, host: Host) -> list[int]:
    """The processes with a seat that are on a host, by its network."""
    network = os.stat(f"/run/netns/{host.namespace}").st_ino
    pids = [event["pid"] for event in events(training.run_dir, "seat")]
    return [pid for pid in pids if os.stat(f"/proc/{pid}/ns/net").st_ino == network]


def check_fenced(trained: Trained, host: Host) -> None:
    """The host has no seat under its number after its loss, whatever became of it."""
    (told,) = trained.events("host-lost")
    lost = told["host"]
    assert host.address in told["how"]
    later = [e for e in trained.events("seat") if e["time"] > told["time"]]
    assert later and lost not in {event["host"] for event in later}


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_host_that_is_unplugged_and_comes_back(
    begin: Begin, cable: list[Host], undisturbed_under
) -> None:
    training = begin("data=3", pause=0.3)
    training.wait_for_step(5)
    pids = pids_on(training, cable[2])
    cable[2].unplug()
    wait_for(training, "resized")
    assert wait_until(lambda: not any(map(is_alive, pids)), 20.0), "it did not end its members"
    cable[2].plug()
    wait_for(training, "resized", 2)
    trained = training.wait(100.0)
    check_same(trained, undisturbed_under("data=3", "judged"))
    check_ledger(trained, NUM_STEPS)
    check_fenced(trained, cable[2])
    changes = [event["change"] for event in trained.events("resized")]
    assert changes == ["data 3 -> 2", "data 2 -> 3"]
    assert trained.result["steps_again"] == 0
    assert trained.events("host-added")[0]["host"] == 3


@pytest.mark.full
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
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3", "judged"))
    check_ledger(trained, NUM_STEPS)
    check_fenced(trained, cable[2])


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["data=3", "data=3 zero=2", "data=6 sync=server servers=3 copies=2"]
)
def test_a_host_that_is_killed(
    begin: Begin, cable: list[Host], undisturbed_under, plan: str
) -> None:
    """All processes that are in its network at once."""
    training = begin(plan, slots=2 if "server" in plan else 1)
    training.wait_for_step(10)
    found = subprocess.run(
        ["ip", "netns", "pids", cable[2].namespace], capture_output=True, text=True, check=True
    )
    for pid in map(int, found.stdout.split()):
        with suppress(ProcessLookupError):  # it ended with another
            os.kill(pid, signal.SIGKILL)
    trained = training.wait()
    for left in Path(tempfile.gettempdir()).glob(
        "shoal-agent-*"
    ):  # nothing on it was left to do so
        shutil.rmtree(left)
    check_same(trained, undisturbed_under(plan, "judged"))
    check_ledger(trained, NUM_STEPS)
    check_fenced(trained, cable[2])


@pytest.mark.full
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
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3", "judged"))
    assert not trained.events("host-lost") and not trained.events("resized")


@pytest.mark.full
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
    trained = training.wait()
    check_same(trained, undisturbed_under(plan, "judged"))
    check_ledger(trained, NUM_STEPS)
    assert not trained.events("host-lost")
    if "zero" not in plan:
        assert not trained.events("exited")


@pytest.mark.full
def test_clocks_that_differ(begin: Begin, cable: list[Host], undisturbed_under) -> None:
    """Monotonic clocks begin when a machine does: no time of one is compared with another's."""
    training = begin("data=3", ahead_s=1_000_000)
    training.wait_for_step(8)
    cable[1].unplug()
    time.sleep(1.0)
    cable[1].plug()
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3", "judged"))
    check_ledger(trained, NUM_STEPS)
    assert not trained.events("host-lost") and not trained.events("resized")
