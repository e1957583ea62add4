"""Runs that span hosts: the bits of one host, each gradient once a host, and nothing left anywhere.

Two hosts are two network namespaces where the user may make them, and otherwise two commands on one
loopback, which have all but the cable. Members 0 and 1 and the servers 4 and 6 are on the first
host, 2, 3, 5 and 7 on the second, and the spares 8 and 9 on one each.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq

from shoal.cluster.invitation import INVITATION, KEYS
from shoal.comm.wire import make_keys
from shoal.faults import VARIABLE
from shoal.testing.ranks import Pool
from tests.support.faults import Trained, Training, check_ledger, check_same, events
from tests.support.hosts import Host, Joining, NoNamespaces, join, overheard, two_hosts
from tests.support.leaks import descendants, is_alive, wait_until

NUM_STEPS = 60
SPANNING = "data=4 sync=server servers=2 hosts=2"
SECOND = (2, 3, 5, 7)  # seats of the second host
IMPATIENT = ("--heartbeat-timeout", "2.5", "--join-timeout", "10")


@pytest.fixture
def alone(undisturbed_under) -> Trained:
    return undisturbed_under("data=4")


@pytest.fixture
def cable() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as made:
        try:
            hosts = made.enter_context(two_hosts())
        except NoNamespaces as why:
            pytest.skip(f"needs network namespaces: {why}")
        yield hosts


class Spanning(NamedTuple):
    training: Training
    joining: Joining

    def pids(self) -> list[int]:
        """Of all members, on both hosts."""
        return [event["pid"] for event in events(self.training.run_dir, "started")]

    def wait(self) -> tuple[Trained, int, str]:
        trained = self.training.wait()
        return trained, *self.joining.wait()


def wait_for_invitation(run_dir: Path) -> None:
    assert wait_until((run_dir / INVITATION).exists, 30.0), "nobody was invited"


@pytest.fixture
def begin(pool: Pool, start: Callable[..., Training]) -> Callable[..., Spanning]:
    """Start a run on two hosts; on one loopback if there is no cable."""

    def both(
        *armed: str,
        hosts: tuple[Host, Host] | None = None,
        plan: str = SPANNING,
        options: tuple[str, ...] = (),
        **settings: object,
    ) -> Spanning:
        address = "127.0.0.1" if hosts is None else hosts[0].address
        spaces = ("", "") if hosts is None else (hosts[0].namespace, hosts[1].namespace)
        options = ("--listen", address, *options)
        training = start(*armed, plan=plan, options=options, namespace=spaces[0], **settings)
        wait_for_invitation(training.run_dir)
        environment = {VARIABLE: ",".join(armed)}
        second = join(pool, training.run_dir, namespace=spaces[1], environment=environment)
        return Spanning(training, second)

    return both


def check_nothing_left(run_dir: Path) -> None:
    for name in (INVITATION, KEYS, "servers", "owner"):
        assert not (run_dir / name).exists(), f"{name} was left"


def check_ended(pids: list[int]) -> None:
    """The kernel ends members with the process that they were forked from, in a moment."""
    assert wait_until(lambda: not any(map(is_alive, pids)), 5.0)


def check_no_secret_told(run_dir: Path, keys: bytes) -> None:
    """Neither in the run's files nor in what was printed."""
    for file in [*run_dir.rglob("*"), *run_dir.parent.glob("*.err"), *run_dir.parent.glob("*.out")]:
        if file.is_file():
            assert not any(secret in file.read_bytes() for secret in secrets_in(keys)), file


def secrets_in(keys: bytes) -> list[bytes]:
    found = msgspec.json.decode(keys, type=dict[str, str])
    return [value.encode() for name, value in found.items() if "secret" in name]


def test_two_hosts_train_the_bits_of_one(begin, cable, alone: Trained) -> None:
    spanning = begin(hosts=cable)
    run_dir = spanning.training.run_dir
    modes = [(run_dir / name).stat().st_mode & 0o777 for name in (INVITATION, KEYS)]
    keys = (run_dir / KEYS).read_bytes()
    trained, code, said = spanning.wait()
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)
    assert code == 0, said
    assert "this is host 1 of the run" in said
    assert "the run begins, with ranks 2, 3 and servers 1, 3 on this host" in said
    assert "the run ended after step 60" in said
    assert "waits for 1 more host: run `shoal join" in trained.errors
    assert modes == [0o600, 0o600]
    hosts = {event["rank"]: event["host"] for event in trained.events("seat")}
    assert {seat for seat, host in hosts.items() if host == 1} == {*SECOND}
    check_nothing_left(run_dir)
    check_no_secret_told(run_dir, keys)


@pytest.mark.full
def test_a_gradient_crosses_the_cable_once_a_host(begin, cable) -> None:
    """Each step sends one push and one pull a host: of two servers half of each lies beyond."""
    sent = []
    for steps in (10, 30):
        before = [host.num_bytes() for host in cable]
        trained, code, _ = begin(hosts=cable, recipe="wide", steps=steps).wait()
        assert trained.exit_code == code == 0, trained.errors
        sent.append([host.num_bytes() - b for host, b in zip(cable, before, strict=True)])
    size = len(trained.model())
    for few, many in zip(*sent, strict=True):
        a_step = (many - few) / 20
        assert 0.9 * size < a_step < 1.4 * size, f"{a_step:,.0f} bytes a step of {size:,}"


@pytest.mark.full
def test_no_parameter_crosses_the_cable_in_the_clear(begin, cable) -> None:
    with overheard(cable[1]) as heard:
        trained, code, _ = begin(hosts=cable, recipe="wide", steps=5).wait()
    assert trained.exit_code == code == 0, trained.errors
    assert b"generation/0/server/1" not in heard, "the store was overheard"
    model = trained.model()
    assert len(heard) > 5 * len(model)
    for start in range(len(model) // 2, len(model) - 64, len(model) // 100):
        assert model[start : start + 32] not in heard


@pytest.mark.parametrize(
    ("point", "member"),
    [
        ("step.computed", 3),
        pytest.param("server.applied", 5, marks=pytest.mark.full),
        pytest.param("host.applied", 7, marks=pytest.mark.full),
        pytest.param("server.applied", 4, marks=pytest.mark.full),
        pytest.param("host.apply", 6, marks=pytest.mark.full),
        pytest.param("step.committed", 0, marks=pytest.mark.full),
    ],
)
def test_a_death_is_repaired_on_its_host(
    begin, cable, alone: Trained, point: str, member: int
) -> None:
    trained, code, said = begin(f"{point}:kill:member={member}:step=20", hosts=cable).wait()
    assert code == 0, said
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)
    assert trained.result["recoveries"] == 1
    hosts = {(event["rank"], event["host"]) for event in trained.events("seat")}
    assert {seat for seat, host in hosts if host == 1} == {*SECOND}
    assert len(hosts) == 8, "a seat changed its host"


@pytest.mark.full
@pytest.mark.parametrize("member", [4, 5])
def test_a_copy_on_another_host_is_taken(begin, cable, alone: Trained, member: int) -> None:
    armed = f"server.applied:kill:member={member}:step=20"
    trained, code, said = begin(armed, hosts=cable, plan=f"{SPANNING} copies=2").wait()
    assert code == 0, said
    check_same(trained, alone)
    assert trained.result["recoveries"] == 1


@pytest.mark.full
def test_a_worker_of_the_second_host_killed_from_outside(begin, alone: Trained) -> None:
    spanning = begin(pause=0.01)
    spanning.training.wait_for_step(5)
    spanning.training.signal_rank(3, signal.SIGKILL)
    trained, code, _ = spanning.wait()
    check_same(trained, alone)
    assert code == 0 and trained.result["recoveries"] == 1
    check_nothing_left(trained.run_dir)


def test_a_host_that_is_lost_ends_the_run(begin, cable) -> None:
    spanning = begin(hosts=cable, options=IMPATIENT, pause=0.01)
    spanning.training.wait_for_step(5)
    pids = spanning.pids()
    spanning.joining.command.send_signal(signal.SIGKILL)
    trained, code, _ = spanning.wait()
    assert (trained.exit_code, code) == (1, -signal.SIGKILL)
    assert "host 1 (" in trained.last_words and cable[1].address in trained.last_words
    assert "was silent for" in trained.last_words
    assert "no other host came within 10 s" in trained.last_words
    check_ended(pids)
    check_nothing_left(trained.run_dir)


@pytest.mark.full
def test_a_host_that_loses_its_fork_server_joins_again(begin, alone: Trained) -> None:
    spanning = begin(pause=0.01)
    spanning.training.wait_for_step(5)
    command = spanning.joining.command.pid
    below = [pid for pid in descendants(command) if parent_of(pid) == command]
    (fork_server,) = [pid for pid in below if descendants(pid)]  # the other removes files
    os.kill(fork_server, signal.SIGKILL)
    trained, code, said = spanning.wait()
    assert (trained.exit_code, code) == (0, 0), (trained.errors, said)
    assert trained.model() == alone.model()
    (lost,) = trained.events("host-lost")
    words = "lost the process that its ranks are forked from, which was killed by SIGKILL"
    assert lost["host"] == 1 and words in lost["how"]
    assert "this host joins again" in said and "this is host 2 of the run" in said
    check_nothing_left(trained.run_dir)


@pytest.mark.full
def test_a_host_that_is_interrupted_twice_leaves_and_ends_the_run(begin) -> None:
    spanning = begin(pause=0.5, options=IMPATIENT)
    spanning.training.wait_for_seats()
    for _ in range(2):
        spanning.joining.command.send_signal(signal.SIGINT)
        time.sleep(0.3)
    trained, code, said = spanning.wait()
    assert (trained.exit_code, code) == (1, 130), (trained.errors, said)
    (lost,) = trained.events("host-lost")
    assert lost["host"] == 1 and "was interrupted by SIGINT" in lost["how"]
    assert "interrupted while it waited for another host" in trained.last_words
    check_nothing_left(trained.run_dir)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.full
def test_hosts_that_lose_each_other_both_end(begin, cable) -> None:
    spanning = begin(hosts=cable, options=IMPATIENT, pause=0.01)
    spanning.training.wait_for_step(5)
    pids = spanning.pids()
    cable[1].unplug()
    trained, code, said = spanning.wait()
    assert (trained.exit_code, code) == (1, 1)
    assert "host 1 (" in trained.last_words and "was silent for" in trained.last_words
    assert "The first host was silent for 2.5 s" in said
    check_ended(pids)
    check_nothing_left(trained.run_dir)


@pytest.mark.full
def test_a_run_goes_on_without_the_hosts_of_one_that_was_killed(begin, start) -> None:
    """What that one left for hosts is removed."""
    spanning = begin(options=IMPATIENT, pause=0.01, save_every=5)
    spanning.training.wait_for_step(20)
    spanning.training.command.send_signal(signal.SIGKILL)
    assert spanning.joining.wait()[0] == 1
    run_dir = spanning.training.run_dir
    assert (run_dir / KEYS).exists()
    trained = start(plan="data=2", options=("--resume",), run_dir=run_dir).wait()
    assert trained.exit_code == 0, trained.errors
    check_nothing_left(run_dir)


@pytest.mark.full
def test_a_first_host_that_is_lost_ends_the_others(begin) -> None:
    spanning = begin(options=IMPATIENT, pause=0.01)
    spanning.training.wait_for_step(5)
    pids = spanning.pids()
    spanning.training.command.send_signal(signal.SIGKILL)
    code, said = spanning.joining.wait()
    assert code == 1 and "The first host was silent for 2.5 s" in said
    check_ended(pids)


@pytest.mark.parametrize("where", ["first", pytest.param("second", marks=pytest.mark.full)])
def test_a_stop_on_either_host_is_one_of_the_run(begin, where: str) -> None:
    spanning = begin(pause=0.02)
    spanning.training.wait_for_step(5)
    process = spanning.training.command if where == "first" else spanning.joining.command
    process.send_signal(signal.SIGINT)
    trained, code, said = spanning.wait()
    assert (trained.exit_code, code) == (75, 75), (trained.errors, said)
    assert "stopped after step" in trained.last_words
    check_nothing_left(trained.run_dir)


@pytest.mark.full
def test_a_run_that_spans_hosts_goes_on(pool: Pool, begin, start, alone: Trained) -> None:
    spanning = begin(pause=0.02)
    spanning.training.wait_for_step(5)
    spanning.training.command.send_signal(signal.SIGINT)
    trained, _, _ = spanning.wait()
    run_dir = trained.run_dir
    again = start(plan=SPANNING, options=("--listen", "127.0.0.1", "--resume"), run_dir=run_dir)
    wait_for_invitation(run_dir)
    second = join(pool, run_dir)
    trained = again.wait()
    assert second.wait()[0] == 0
    check_same(trained, alone)


@pytest.mark.full
def test_a_third_host_is_told_that_the_run_is_full(pool: Pool, begin) -> None:
    """Also once there are checkpoints, which are none of its business."""
    spanning = begin(pause=0.1, save_every=2)
    spanning.training.wait_for_step(5)
    assert wait_until(lambda: bool(events(spanning.training.run_dir, "saved")), 30.0)
    code, said = join(pool, spanning.training.run_dir).wait()
    assert code == 2 and "The run has all of its 2 hosts already" in said, said
    assert "--resume" not in said
    spanning.training.command.send_signal(signal.SIGINT)
    assert spanning.wait()[0].exit_code == 75


@pytest.mark.full
def test_a_run_that_lost_a_host_before_its_first_checkpoint_begins_anew(
    pool: Pool, begin, start
) -> None:
    spanning = begin(pause=0.05, options=IMPATIENT)
    spanning.training.wait_for_step(2)
    spanning.joining.command.send_signal(signal.SIGKILL)
    trained = spanning.training.wait()
    assert trained.exit_code == 1 and "no other host came within 10 s" in trained.last_words
    options, run_dir = ("--listen", "127.0.0.1", "--resume"), trained.run_dir
    again = start(plan=SPANNING, options=options, run_dir=run_dir, steps=6, pause=0.05)
    wait_for_invitation(run_dir)
    second = join(pool, run_dir)
    trained = again.wait()
    assert (trained.exit_code, second.wait()[0]) == (0, 0), trained.errors
    assert "begins at step 0" in trained.errors and len(trained.steps()) == 6


def test_ctrl_c_while_waiting_leaves_nothing(start) -> None:
    training = start(plan=SPANNING, options=("--listen", "127.0.0.1"))
    wait_for_invitation(training.run_dir)
    training.command.send_signal(signal.SIGINT)
    trained = training.wait()
    assert trained.exit_code == 130, trained.errors
    assert not trained.run_dir.exists()


def test_hosts_that_do_not_come_end_the_waiting(start) -> None:
    options = ("--listen", "127.0.0.1", "--join-timeout", "0.5")
    trained = start(plan=SPANNING, options=options).wait()
    assert trained.exit_code == 1
    assert "1 host of 2 did not come within 0.5 s" in trained.last_words
    assert not trained.run_dir.exists()


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ("data=2", ("--listen", "127.0.0.1"), "no effect for one host. Say with --nodes N"),
        (SPANNING, ("--listen", "127.0.0.1", "--nodes", "3"), "hosts=2, and the run has 3"),
        (SPANNING, ("--nodes", "2"), "--nodes has no effect without --listen"),
        (SPANNING, ("--listen", "203.0.113.7"), "is not an address of this machine"),
        (SPANNING, ("--listen", "nowhere"), "is not an IP address"),
        (SPANNING, ("--join-timeout", "5"), "no effect without --listen"),
    ],
)
def test_what_cannot_be_listened_to(start, plan: str, options: tuple[str, ...], words: str) -> None:
    trained = start(plan=plan, options=options).wait()
    assert trained.exit_code == 2 and words in trained.last_words
    assert not trained.run_dir.exists()


def test_who_may_not_join(pool: Pool, start, tmp_path: Path, undisturbed: Trained) -> None:
    """Each is told why; the run that waits is not disturbed, and takes the host that may."""
    training = start(plan=SPANNING, options=("--listen", "127.0.0.1"), recipe="unlike")
    run_dir = training.run_dir
    wait_for_invitation(run_dir)
    refused = []

    def refuse(directory: Path, words: str) -> None:
        refused.append((join(pool, directory), words))

    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(empty, "holds no run that waits for hosts")
    refuse(tmp_path / "missing", "holds no run that waits for hosts")
    refuse(undisturbed.run_dir, "under 'data=3 pieces=3', waits for no hosts")
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    refuse(copy, "which is not the same directory on this host")
    for joining, words in refused:
        code, said = joining.wait()
        assert code == 2 and words in said, said
    check_changed(pool, run_dir)
    check_wrong_keys(pool, run_dir)
    check_stranger(run_dir)
    first, second = join(pool, run_dir), join(pool, run_dir)
    trained = training.wait()
    (won, said), (lost, why) = sorted([first.wait(), second.wait()])
    assert (trained.exit_code, won, lost) == (0, 0, 2), (trained.errors, said, why)
    assert "all of its 2 hosts already" in why or "has ended" in why or "Nobody answers" in why
    code, said = join(pool, run_dir).wait()
    assert code == 2 and "waits for no hosts: it has ended" in said


def check_changed(pool: Pool, run_dir: Path) -> None:
    """A host whose recipe, data or version differ."""
    code, said = join(pool, run_dir, environment={"TINY_SEED": "7"}).wait()
    assert code == 2 and "seed is 0 on the first host and 7 on this one" in said, said
    invitation = (run_dir / INVITATION).read_bytes()
    for before, after, words in [
        (b'"shoal":"', b'"shoal":"9', "Install one version on all hosts"),
    ]:
        assert before in invitation
        (run_dir / INVITATION).write_bytes(invitation.replace(before, after))
        code, said = join(pool, run_dir).wait()
        assert code == 2 and words in said, said
        (run_dir / INVITATION).write_bytes(invitation)


def check_wrong_keys(pool: Pool, run_dir: Path) -> None:
    """Keys that others may read, and keys of another run."""
    keys = run_dir / KEYS
    keys.chmod(0o644)
    code, said = join(pool, run_dir).wait()
    assert code == 2 and "keys can be read by others" in said, said
    keys.chmod(0o600)
    content = keys.read_bytes()
    keys.unlink()
    make_keys(keys)
    code, said = join(pool, run_dir).wait()
    assert code == 2 and "No answer came from tcp://127.0.0.1:" in said, said
    keys.write_bytes(content)


def check_stranger(run_dir: Path) -> None:
    """Who speaks ZeroMQ and has no keys gets no answer."""
    address = msgspec.json.decode((run_dir / INVITATION).read_bytes())["address"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        line.connect(address)
        line.send(b"let me in")
        assert not line.poll(500)
