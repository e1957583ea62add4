"""Hosts on one machine, for tests: network namespaces on a switch.

Each has its own loopback, addresses and ports; files and process numbers are shared. What crosses
the cable is counted by the kernel. Needs `ip` and the right to make namespaces, which is root's.
"""

import ctypes
import os
import runpy
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.cli.main import run_here
from shoal.cluster import host_agent, hosts
from shoal.comm.wire import Keys, new_keys
from shoal.testing.ranks import Command, Pool

KEYS_NOTED = "SHOAL_TEST_KEYS"  # the file in which a test finds the keys of the run
PATIENCE_S = 3.0  # with which a host waits for the run's first answer
_NET = 0x40000000  # CLONE_NEWNET
_ALL = 0x0003  # ETH_P_ALL


class NoNamespaces(Exception):
    """Why this machine or this user cannot have them."""


class Host(NamedTuple):
    namespace: str
    address: str
    interface: str

    def unplug(self) -> None:
        """Cut the cable."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def plug(self) -> None:
        """Put the cable in again."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")

    def silence_towards(self, other: "Host") -> None:
        """Drop what this host sends to another, and nothing else."""
        _ip("-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32")

    def speak_to(self, other: "Host") -> None:
        _ip("-n", self.namespace, "route", "del", "blackhole", f"{other.address}/32")

    def narrow(self, rate: str) -> None:
        """Let no more than this through from now on, as in 400kbit."""
        limit = ["tbf", "rate", rate, "burst", "4kb", "latency", "500ms"]
        words = ["qdisc", "add", "dev", self.interface, "root", *limit]
        subprocess.run(["tc", "-n", self.namespace, *words], capture_output=True, check=True)

    def signal(self, number: int) -> None:
        """To all processes on this host."""
        words = ["ip", "netns", "pids", self.namespace]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for pid in map(int, found.split()):
            with suppress(ProcessLookupError):  # it ended with another
                os.kill(pid, number)

    def reset_connections(self) -> int:
        """Break every TCP connection of this host at once; how many there were."""
        enter = ["ip", "netns", "exec", self.namespace]
        kill = ["ss", "-H", "-K", "-t", "state", "established"]
        done = subprocess.run([*enter, *kill], capture_output=True, text=True)
        return len(done.stdout.splitlines())

    def num_bytes(self) -> int:
        """What has left this host through the cable."""
        words = ["ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", self.interface]
        (told,) = msgspec.json.decode(subprocess.run(words, capture_output=True, check=True).stdout)
        return int(told["stats64"]["tx"]["bytes"])


@contextmanager
def several_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that are each plugged into one switch. Raises NoNamespaces where none can be made."""
    mark = os.urandom(3).hex()
    hosts = [Host(f"shoal-{mark}-{i}", f"10.78.0.{i + 1}", f"sh{mark}{i}") for i in range(count)]
    switch = f"shoal-{mark}-switch"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            port = f"{host.interface}s"
            _ip("link", "add", host.interface, "type", "veth", "peer", "name", port)
            _ip("link", "set", host.interface, "netns", host.namespace)
            _ip("link", "set", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield hosts
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            if Path("/run/netns", namespace).exists():
                _ip("netns", "delete", namespace)


# Another host's processes are not to be seen, nor the memory that they would share.
APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def throttle(hosts: Sequence[Host], megabits: int) -> None:
    """Hold what leaves each host to so many megabits a second."""
    for host in hosts:
        words = ["tc", "-n", host.namespace, "qdisc", "replace", "dev", host.interface, "root"]
        words += ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
        subprocess.run(words, check=True, capture_output=True)


def write_ssh(
    path: Path,
    hosts: Mapping[str, Host],
    hidden: Path | None = None,
    ahead_s: int = 0,
    is_apart: bool = False,
    disk: tuple[Path, str] | None = None,
) -> str:
    """A command in the place of ssh, which enters the host's namespace instead. There a directory
    is hidden, as if its disk were the first host's own, and monotonic clocks are ahead, as those of
    a machine that started earlier; if it `is_apart`, it shares no memory with the first. Its
    temporary files may be on a `disk` of a size. Returns what SHOAL_SSH is to be."""
    apart = " ".join(APART) + " " if is_apart else ""
    clock = f"unshare --time --monotonic {ahead_s} --boottime {ahead_s} " if ahead_s else ""
    cases = "\n".join(f"{name}) space={host.namespace} ;;" for name, host in hosts.items())
    hide = "" if hidden is None else f"mount -t tmpfs none '{hidden}' && "
    if disk is not None:
        disk[0].mkdir(exist_ok=True)
        hide += f"mount -t tmpfs -o size={disk[1]} none '{disk[0]}' && TMPDIR='{disk[0]}' "
    path.write_text(
        f"""#!/bin/sh
host=$1
shift
case $host in
{cases}
*) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
cd /
exec ip netns exec $space {apart}{clock}sh -c "{hide}exec $*"
"""
    )
    path.chmod(0o755)
    return str(path)


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], capture_output=True, check=True, text=True)
    except FileNotFoundError:
        raise NoNamespaces("there is no `ip` command here") from None
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"`ip {' '.join(words)}`: {error.stderr.strip()}") from error


def _enter(namespace: str) -> None:
    """This thread, and what it starts."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


@contextmanager
def overheard(host: Host) -> Iterator[bytearray]:
    """What crosses the cable while the block runs, as anybody on the way would see it."""
    heard, is_over = bytearray(), threading.Event()

    def listen() -> None:
        _enter(host.namespace)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
            wire.bind((host.interface, 0))
            wire.settimeout(0.1)
            while not is_over.is_set():
                with suppress(TimeoutError):
                    heard.extend(wire.recv(1 << 17))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield heard
    finally:
        is_over.set()
        thread.join()


def before_others(directory: Path) -> str:
    """PYTHONPATH with this directory before what it has."""
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def run_in(namespace: str, words: list[str]) -> int:
    """Run a command of Shoal on a host, or here; the process that calls this stays there."""
    if namespace:
        _enter(namespace)
    for directory in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (site := Path(directory, "sitecustomize.py")).is_file():  # as a fresh Python would
            runpy.run_path(str(site))
    host_agent.ANSWER_S = PATIENCE_S
    if path := os.environ.get(KEYS_NOTED):
        hosts.new_keys = lambda: _noted_keys(Path(path))  # type: ignore[attr-defined]
    return run_here(words)


def _noted_keys(path: Path) -> Keys:
    """New keys, which the test may look for where they must not be."""
    made = new_keys()
    path.write_bytes(msgspec.json.encode(made))
    return made


class Joining(NamedTuple):
    """`shoal join` under way."""

    command: Command
    errors: Path

    def wait(self, timeout_s: float = 30.0) -> tuple[int, str]:
        """Its exit code, and what it said."""
        code = self.command.wait(timeout_s)
        return code, self.errors.read_text(errors="replace")


def join(
    pool: Pool, run_dir: Path, *, namespace: str = "", environment: Mapping[str, str] | None = None
) -> Joining:
    """Start `shoal join`, on a host of its own or here."""
    number = sum(1 for _ in run_dir.parent.glob("join-*.err"))
    errors = run_dir.parent / f"join-{number}.err"
    command = pool.start(
        run_in,
        namespace,
        ["join", str(run_dir)],
        environment=environment,
        output=errors.with_suffix(".out"),
        errors=errors,
        directory=run_dir.parent,
    )
    return Joining(command, errors)
