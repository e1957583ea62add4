"""Tests that every back end must pass.

    class TestMine(BackendConformance):
        @pytest.fixture
        def backend(self):
            return MyBackend()

        def lose(self, started):
            started.processes.agent.kill()

A new back end gives these two and inherits the tests. They are about what the supervisor relies on:
facts of the preparation, processes that start with their variables and log, reports of each start
and end, signals that arrive, a lost agent that is noticed (by EOFError, or by HostLost where there
are others), and that nothing runs after the block.
Cost: a second each.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.backend import Backend, StartedRun
from shoal.cluster.local import NotLoaded
from shoal.system.fork_server import HostLost, Report, WorkerExited, WorkerSpec, WorkerStarted

LIMIT_S = 30.0


def _work(spec: WorkerSpec) -> int:
    """Says that it runs, in its log; then does as its variables say."""
    os.write(1, f"member {spec.number} has {spec.variables['SAY']}\n".encode())
    if spec.variables["SAY"] == "sleep":
        time.sleep(600)
    return int(spec.variables.get("CODE", "0"))


def _fail() -> Any:
    raise KeyError("of the preparation")


def reports(started: StartedRun, num_exits: int) -> Iterator[Report]:
    """All until so many processes have ended."""
    deadline = time.monotonic() + LIMIT_S
    while num_exits:
        report = started.processes.next_report(max(0.0, deadline - time.monotonic()))
        assert report is not None, "no report came in time"
        if isinstance(report, HostLost):
            raise EOFError(report.how)
        num_exits -= isinstance(report, WorkerExited)
        yield report


def is_alive(pid: int) -> bool:
    """One that has ended, and that its parent has not asked about yet, is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


class BackendConformance:
    """Inherit, and give `backend` and `lose`. Its processes must be on this machine."""

    plan = ""  # what the preparation finds: one with hosts, if the back end is of several
    host = 0  # on which processes start

    def prepare(self) -> tuple[dict[str, Any], Callable[[WorkerSpec], int]]:
        return {"plan": self.plan, "found": 7}, _work

    def lose(self, started: StartedRun) -> None:
        """Kill, without a warning, what starts processes on the host."""
        raise NotImplementedError("kill the agent of the back end under test")

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("return the back end under test")

    @pytest.fixture
    def run_dir(self, tmp_path: Path) -> Path:
        (tmp_path / "logs").mkdir()
        return tmp_path

    def spec(self, run_dir: Path, number: int, say: str = "hello", **more: str) -> WorkerSpec:
        log = run_dir / "logs" / f"rank-{number:03d}.log"
        return WorkerSpec(number, str(log), {"SAY": say, **more}, self.host)

    def test_processes_start_and_report_how_they_end(self, backend: Backend, run_dir: Path) -> None:
        with backend.start(self.prepare, run_dir, lambda event: None) as started:
            assert started.facts["found"] == 7
            started.processes.spawn(self.spec(run_dir, 0))
            started.processes.spawn(self.spec(run_dir, 1, CODE="3"))
            found = list(reports(started, 2))
            assert {r.number for r in found if isinstance(r, WorkerStarted)} == {0, 1}
            ends = {r.number: r.status for r in found if isinstance(r, WorkerExited)}
            assert ends == {0: 0, 1: 3} and not started.processes.pids
            started.end(0, "done")
        assert "member 1 has hello" in (run_dir / "logs" / "rank-001.log").read_text()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_signal_arrives(
        self, backend: Backend, run_dir: Path, number: signal.Signals
    ) -> None:
        with backend.start(self.prepare, run_dir, lambda event: None) as started:
            started.processes.spawn(self.spec(run_dir, 5, "sleep"))
            first = started.processes.next_report(LIMIT_S)
            assert isinstance(first, WorkerStarted) and list(started.processes.pids) == [5]
            log, deadline = run_dir / "logs" / "rank-005.log", time.monotonic() + LIMIT_S
            while not (log.exists() and log.read_text()):  # before that it may ignore some
                assert time.monotonic() < deadline, "the process does not run"
                time.sleep(0.01)
            started.processes.kill(5, number)
            (last,) = reports(started, 1)
            assert isinstance(last, WorkerExited) and last.status == -number

    def test_nothing_runs_after_the_block(self, backend: Backend, run_dir: Path) -> None:
        with backend.start(self.prepare, run_dir, lambda event: None) as started:
            started.processes.spawn(self.spec(run_dir, 0, "sleep"))
            assert isinstance(started.processes.next_report(LIMIT_S), WorkerStarted)
            pids = list(started.processes.pids.values())
            assert all(map(is_alive, pids))
        wait_until_gone(pids)

    def test_a_lost_agent_is_noticed_and_leaves_nothing(
        self, backend: Backend, run_dir: Path
    ) -> None:
        with backend.start(self.prepare, run_dir, lambda event: None) as started:
            started.processes.spawn(self.spec(run_dir, 0, "sleep"))
            assert isinstance(started.processes.next_report(LIMIT_S), WorkerStarted)
            pids = list(started.processes.pids.values())
            self.lose(started)
            with pytest.raises(EOFError):
                list(reports(started, 2))  # its end may be reported before
            assert started.processes.describe_loss()
        wait_until_gone(pids)

    def test_a_preparation_that_fails_says_why(self, backend: Backend, run_dir: Path) -> None:
        starting = backend.start(_fail, run_dir, lambda event: None)
        with pytest.raises(NotLoaded, match="of the preparation") as raised, starting:
            pass
        assert "in _fail" in raised.value.trace
