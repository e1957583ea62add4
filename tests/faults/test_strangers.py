"""Strangers at every socket of a run: it ends with the same bits, and they get nothing.

Another user of the machine is not let in by the kernel, but for the ports at which Gloo listens
(`docs/techniques/security.md`). A process of the same user gets in, and is not heard: it knows no
secret of the run. The tests need to be root to be another user.
"""

import os
import random
import shutil
import socket
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.cluster.invitation import INVITATION
from shoal.comm.unix import NAME
from shoal.testing.ranks import Command, Pool
from tests.faults import strangers
from tests.faults.strangers import OTHER, attack, attempts_of
from tests.support.faults import Trained, Training, check_same
from tests.support.hosts import join
from tests.support.leaks import listening_ports, wait_until

SERVED = "data=3 sync=server servers=2"
COPIED = "data=3 sync=server servers=2 copies=2"
MOST_MORE_BYTES = 64 << 20  # that a process of the run may hold after an attack
MOST_LINES = 1  # about strangers, in a log
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Where others may look, as in most home directories."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-strangers-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder / "run"
    shutil.rmtree(folder)


def targets_of(training: Training) -> list[str]:
    """Every place at which a process of the run listens."""
    control = training.run_dir / "control"  # bound by another name
    found = {f"ipc://{control}"} if control.exists() else set()
    for pid in training.processes():
        for port in listening_ports(pid):
            address, _, number = port.rpartition(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else "::1"
            found.add(f"tcp://{host}:{int(number, 16)}")
    kinds = {"0001": "ipc", "0005": "seq"}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7].startswith(str(training.run_dir)):
            found.add(f"{kinds[words[4]]}://{words[7]}")
    return sorted(found)


def sizes(training: Training) -> dict[int, int]:
    return {pid: psutil.Process(pid).memory_info().rss for pid in training.processes()}


def attacked(
    pool: Pool, training: Training, user: int, count: int, targets: list[str] | None = None
) -> Counter[str]:
    """What became of an attack, during which no process of the run grew much."""
    targets, before = targets or targets_of(training), sizes(training)
    folder = training.run_dir.parent
    errors = folder / "attack.err"
    files = {"output": folder / "attack.out", "errors": errors, "directory": folder}
    command: Command = pool.start(attack, user, targets, count, 7, **files)
    assert command.wait(max(50.0, count / 200)) == 0, errors.read_text()
    assert training.command.is_running(), "the run ended under the attack"
    for pid, size in sizes(training).items():
        assert size - before.get(pid, size) < MOST_MORE_BYTES, f"process {pid} grew"
    return attempts_of(files["output"])


def check_unimpressed(trained: Trained, undisturbed: Trained) -> None:
    check_same(trained, undisturbed)
    assert trained.result["recoveries"] == 0
    logs = [trained.errors, *(p.read_text() for p in (trained.run_dir / "logs").glob("*.log"))]
    for text in logs:
        assert "Traceback" not in text, text
        assert sum("is not heard" in line for line in text.splitlines()) <= MOST_LINES, text
    assert not (trained.run_dir / NAME).exists()


def under_attack(start: Callable[..., Training], run_dir: Path, plan: str) -> Training:
    """A run that lasts until `let_end`."""
    training = start(
        recipe="lasting",
        plan=plan,
        run_dir=run_dir,
        pause=0.02,
        file=str(run_dir.with_name("over")),
        options=("--heartbeat-timeout", "60"),
    )
    training.wait_for_step(1, 60.0)
    return training


def let_end(training: Training) -> Trained:
    training.run_dir.with_name("over").touch()
    return training.wait()


LONG = pytest.mark.timeout(900)


@needs_root
@pytest.mark.parametrize(
    ("plan", "count"),
    [
        (SERVED, 1_000),
        pytest.param("data=3", 10_000, marks=[pytest.mark.full, LONG]),
        pytest.param(COPIED, 20_000, marks=[pytest.mark.full, LONG]),
    ],
)
def test_another_user_is_not_let_in(
    pool: Pool, start, undisturbed_under, run_dir: Path, plan: str, count: int
) -> None:
    training = under_attack(start, run_dir, plan)
    found = targets_of(training)
    unix = [target for target in found if not target.startswith("tcp")]
    assert len(unix) == (3 if plan == "data=3" else 7)  # control, store, supervisor; and servers
    assert stat.S_IMODE((run_dir / NAME).stat().st_mode) == 0o700
    servers = [pid for seat, pid in training.wait_for_seats().items() if seat > 2]
    for pid in (training.command.pid, *servers):  # only ranks do, by Gloo, and on loopback
        assert not listening_ports(pid)
    assert all(target.startswith("tcp://127.0.0.1:") for target in found if target not in unix)
    told = attacked(pool, training, OTHER, count // 2, unix)
    assert told.keys() == {"forbidden"}, told
    attacked(pool, training, OTHER, count // 2, found)
    check_unimpressed(let_end(training), undisturbed_under("data=3"))


@pytest.mark.parametrize(
    ("plan", "count"),
    [
        (SERVED, 1_500),
        pytest.param("data=3", 20_000, marks=[pytest.mark.full, LONG]),
        pytest.param(SERVED, 20_000, marks=[pytest.mark.full, LONG]),
        pytest.param(COPIED, 20_000, marks=[pytest.mark.full, LONG]),
    ],
)
def test_who_knows_no_secret_is_not_heard(
    pool: Pool, start, undisturbed_under, run_dir: Path, plan: str, count: int
) -> None:
    """A process of the same user, at every socket."""
    training = under_attack(start, run_dir, plan)
    told = attacked(pool, training, os.getuid(), count)
    assert told["frames"] > count / 4 and told["bytes"] > count / 50 and not told["forbidden"], told
    check_unimpressed(let_end(training), undisturbed_under("data=3"))


@pytest.mark.parametrize(
    "count", [500, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_between_hosts_only_keys_open(
    pool: Pool,
    start,
    undisturbed_under,
    tmp_path: Path,
    count: int,
) -> None:
    """Ports of a run that spans hosts can be reached by everybody."""
    training = start(
        recipe="lasting",
        plan="data=4 sync=server servers=2 hosts=2",
        pause=0.02,
        file=str(tmp_path / "over"),
        options=("--listen", "127.0.0.1", "--heartbeat-timeout", "60"),
    )
    assert wait_until((training.run_dir / INVITATION).exists, 60.0)
    joining = join(pool, training.run_dir)
    training.wait_for_step(1, 60.0)
    user = OTHER if os.getuid() == 0 else os.getuid()
    ports = [t for t in targets_of(training) if t.startswith("tcp")]
    assert len(ports) >= 5  # hosts, supervisor, store and two servers; and Gloo's
    told = attacked(pool, training, user, count, ports)
    assert told["bytes"] > count / 50 and told["frames"] > count / 4, told
    trained = let_end(training)
    code, said = joining.wait()
    assert code == 0, said
    check_unimpressed(trained, undisturbed_under("data=4"))


def test_the_generator_makes_names_that_no_member_has() -> None:
    draws = random.Random(1)
    names = {strangers.identity(draws) for _ in range(500)}
    assert any(not name.isascii() for name in names) and all(0 < len(n) < 256 for n in names)
    assert len(names) > 100
