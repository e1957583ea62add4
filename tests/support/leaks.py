"""What a test leaves behind, and fixtures that fail it for that.

A `Traces` is a snapshot of this process's surroundings: its descendants (orphans too, since they
are handed to this process), its threads, its listening ports, shared-memory segments, environment
variables and temporary files. /dev/shm is shared with the whole machine, so a segment counts if
this process or a descendant has it open or mapped when it is first seen, or if its name has the
number of one. Import `no_leaks` and `private_temporary_directory` in a `conftest.py` and every test
is compared with the moment before it.

Linux only. Cost: two milliseconds a test, and some more while there are child processes. What a
test keeps on purpose (a pool of ranks) is named by the fixture `kept_processes`, which a
`conftest.py` may override.
"""

import ctypes
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

PATIENCE_S = 3.0  # for what is on its way out
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = Path("/dev/shm")
_LISTENING = "0A"
_NOT_OURS = ("PYTEST_", "TORCHINDUCTOR_", "CRC32C_")  # set by the runner and by libraries
_CACHES = ("torchinductor_",)  # torch's own, made once and kept
_SERVERS = ("PostgreSQL.",)  # of servers that a session keeps
_NUMBERED = re.compile(r"torch_([0-9]+)_")  # what torch shares between processes, by its maker
_known_processes: set[int] = set()  # this one and all descendants that were ever seen
_is_ours: dict[tuple[str, int], bool] = {}  # what was found out of a segment, by name and inode


class Traces(NamedTuple):
    """What can outlive a test. Compare two of them with `left_between`."""

    processes: frozenset[str]
    threads: frozenset[str]
    ports: frozenset[str]
    segments: frozenset[str]
    variables: frozenset[str]
    temporary_files: frozenset[str]


def traces(kept: frozenset[int] = frozenset()) -> Traces:
    """A snapshot, without the processes `kept` on purpose."""
    below = descendants()
    return Traces(
        processes=frozenset(f"{pid} {_title(pid)}" for pid in below if pid not in kept),
        threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate() if t.is_alive()),
        ports=frozenset(_own_ports()),
        segments=frozenset(own_segments({os.getpid(), *below})),
        variables=frozenset(
            f"{name}={value}"
            for name, value in os.environ.items()
            if not name.startswith(_NOT_OURS)
        ),
        temporary_files=frozenset(
            name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(_CACHES)
        ),
    )


def left_between(before: Traces, after: Traces) -> list[str]:
    """What is new in the second snapshot, in words; variables that vanished count as well."""
    found = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(new - old))}"
        for kind, old, new in zip(Traces._fields, before, after, strict=True)
        if new - old
    ]
    vanished = before.variables - after.variables
    return found + ([f"variables gone: {', '.join(sorted(vanished))}"] if vanished else [])


def descendants(pid: int | None = None) -> set[int]:
    """The living descendants of a process (this one by default); zombies do not count."""
    found: set[int] = set()
    if pid is None and not _has_children():
        return found  # with orphans adopted, who has no child has no descendant
    # All are asked: a child may have a lower number than its parent, since numbers begin again.
    parents: dict[int, list[int]] = {}
    for number in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if (stat := _stat(number)) and stat[0] != "Z":
            parents.setdefault(stat[1], []).append(number)
    queue = [os.getpid() if pid is None else pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found.update(children)
        queue += children
    return found


def own_segments(processes: set[int]) -> set[str]:
    """The files of /dev/shm that these processes made, as far as it can be known: what nobody of
    them holds may be anybody's."""
    _known_processes.update(processes)
    found = {}
    with suppress(FileNotFoundError), os.scandir(_SHARED_MEMORY) as entries:
        found = {(e.name, e.inode()): e for e in entries if not e.name.startswith(_SERVERS)}
    if not found.keys() <= _is_ours.keys():
        held = set().union(*map(_held_segments, processes))
        for name, inode in found.keys() - _is_ours.keys():
            maker = _NUMBERED.match(name)
            of_known = maker is not None and int(maker[1]) in _known_processes
            _is_ours[name, inode] = of_known or name in held
    return {name for name, inode in found if _is_ours[name, inode]}


def _held_segments(pid: int) -> set[str]:
    """The files of /dev/shm that a process has open or mapped."""
    held = []
    with suppress(OSError):  # it has ended, or is another user's
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed since it was listed
                held.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        held += [line[line.index("/") :] for line in maps.splitlines() if "/dev/shm/" in line]
    prefix = f"{_SHARED_MEMORY}/"
    return {path.removeprefix(prefix) for path in held if path.startswith(prefix)}


def is_alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def _own_ports() -> set[str]:
    """The TCP ports on which this process listens. Asked of its sockets: to read /proc/net/tcp
    takes the kernel some milliseconds, since it has a place for every connection there could be."""
    ports: set[str] = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as made:
                is_tcp = made.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add("{}:{}".format(*made.getsockname()))
    return ports


def listening_ports(pid: int) -> set[str]:
    """The TCP ports on which a process listens, as address:port in hex."""
    own = set()
    folder = f"/proc/{pid}/fd"
    for entry in os.listdir(folder):
        try:
            own.add(os.readlink(f"{folder}/{entry}"))
        except OSError:
            continue  # closed since it was listed
    ports: set[str] = set()
    if not any(target.startswith("socket:") for target in own):
        return ports
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in own:
                    ports.add(fields[1])
    return ports


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent died, so that they are seen."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wait_until(holds: Callable[[], bool], timeout_s: float, period_s: float = 0.02) -> bool:
    """Whether something came true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(period_s)
    return True


@pytest.fixture(scope="session", autouse=True)
def private_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Temporary files of the test run lie in a directory of its own, and orphans come to us."""
    adopt_orphans()
    directory = tmp_path_factory.mktemp("temporary")
    variable, module = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    yield directory
    tempfile.tempdir = module
    if variable is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = variable


@pytest.fixture(scope="session")
def kept_processes() -> Callable[[], frozenset[int]]:
    """The processes that may outlive a test."""
    return frozenset


@pytest.fixture(autouse=True)
def no_leaks(
    private_temporary_directory: Path, kept_processes: Callable[[], frozenset[int]]
) -> Iterator[None]:
    """Fail a test that leaves something behind."""
    before = traces(kept_processes())
    yield
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = left_between(before, traces(kept_processes()))
        return not left

    if not wait_until(nothing_left, PATIENCE_S, period_s=0.05):
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            content = file.read()
    except OSError:
        return None
    state, parent = content.rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


def _title(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:80]
