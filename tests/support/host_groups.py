"""Hosts for tests that need no network: groups of processes of this machine's fork server.

`--on groups:3` is a back end whose run has three hosts. A test loses one with `lose`: its processes
are killed, and the supervisor hears of the host and not of them; `add` brings another one. Orders
go through a file beside the run directory, so that the test is another process.
"""

import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.cluster.backend import StartedRun
from shoal.cluster.local import LocalBackend
from shoal.events.events import OnEvent
from shoal.launch import backends
from shoal.system.fork_server import (
    HostJoined,
    HostLost,
    Prepare,
    Processes,
    Report,
    WorkerExited,
    WorkerSpec,
)
from tests.support.hosts import run_in


def run_on_groups(namespace: str, words: list[str]) -> int:
    """Run a command of Shoal that knows `--on groups:N`."""
    backends.BACKENDS["groups"] = lambda address, recipe, options: GroupsBackend(int(address))
    return run_in(namespace, words)


def lose(run_dir: Path, host: int) -> None:
    _order(run_dir, f"lose {host}")


def add(run_dir: Path, host: int, num_slots: int) -> None:
    _order(run_dir, f"add {host} {num_slots}")


def _order(run_dir: Path, words: str) -> None:
    with _orders(run_dir).open("a") as file:
        file.write(words + "\n")


def _orders(run_dir: Path) -> Path:
    return run_dir.with_name(run_dir.name + ".orders")


class GroupsBackend:
    def __init__(self, num_hosts: int):
        self._num_hosts = num_hosts

    @contextmanager
    def start(self, prepare: Prepare, run_dir: Path, watch: OnEvent) -> Iterator[StartedRun]:
        with LocalBackend().start(prepare, run_dir, watch) as started:
            groups = HostGroups(started.processes, run_dir)
            yield started._replace(processes=groups, num_hosts=self._num_hosts)


class HostGroups:
    """`Processes` of hosts that are groups of processes."""

    def __init__(self, own: Processes, run_dir: Path):
        self._own, self._orders = own, _orders(run_dir)
        self._hosts: dict[int, int] = {}  # of processes
        self._lost: set[int] = set()
        self._num_done = 0  # orders
        self._reports: deque[Report] = deque()

    @property
    def pids(self) -> dict[int, int]:
        return {n: pid for n, pid in self._own.pids.items() if self._hosts[n] not in self._lost}

    @property
    def poll_sources(self) -> list[Any]:
        return self._own.poll_sources

    def spawn(self, spec: WorkerSpec) -> None:
        assert spec.host not in self._lost, "a process was started on a host that is lost"
        self._hosts[spec.number] = spec.host
        self._own.spawn(spec)

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None:
        self._own.kill(number, signal_number)

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        self._obey()
        if self._reports:
            return self._reports.popleft()
        report = self._own.next_report(timeout_s)
        if isinstance(report, WorkerExited) and self._hosts[report.number] in self._lost:
            return self.next_report(timeout_s)
        return report

    def describe_loss(self) -> str:
        return self._own.describe_loss()

    def close(self) -> object:
        return self._own.close()

    def _obey(self) -> None:
        orders = self._orders.read_text().splitlines() if self._orders.exists() else []
        for order in orders[self._num_done :]:
            word, host, *slots = order.split()
            if word == "add":
                self._reports.append(HostJoined(int(host), int(slots[0])))
                continue
            self._lost.add(int(host))
            for number in [n for n in self._own.pids if self._hosts[n] == int(host)]:
                self._own.kill(number)
            self._reports.append(HostLost(int(host), "was silent for 1.0 s"))
        self._num_done = len(orders)
