"""The members of one host, as its agent drives them: started, signalled, ended; and their logs.

Read next: `host_agent.py`, which receives the requests; `system/fork_server.py`.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.cluster.host_channel import HostLog, RunEnded
from shoal.system.fork_server import (
    ForkServer,
    SignalWorker,
    SpawnWorker,
    WorkerExited,
    WorkerStarted,
)
from shoal.system.processes import describe_exit, stop_signals

MOST_LOG_BYTES = 256 << 10  # of each log that is sent: its end
MOST_LOGS_BYTES = 8 << 20  # of all of them


class HostMembers:
    """Members that are forked on this host."""

    def __init__(
        self,
        fork_server: ForkServer,
        variables: dict[str, str],
        own_logs: Path | None,
        tell: Callable[[str], None],
    ):
        """`own_logs` is where their logs go if this host does not see the run directory."""
        self._fork_server, self._variables, self._tell = fork_server, variables, tell
        self._own_logs = own_logs
        self._signals: list[int] = []
        self._num_forwarded = 0  # of `_signals`
        self.gone = ""  # how they ended; no other will start then

    @property
    def poll_sources(self) -> list[Any]:
        return [] if self.gone else self._fork_server.poll_sources

    def spawn(self, request: SpawnWorker) -> None:
        spec = request.spec
        log = spec.log if self._own_logs is None else str(self._own_logs / Path(spec.log).name)
        own = msgspec.structs.replace(spec, log=log, variables=spec.variables | self._variables)
        if not self.gone:
            with suppress(BrokenPipeError):  # `reports` finds that it has ended
                self._fork_server.spawn(own)

    def kill(self, request: SignalWorker) -> None:
        if not self.gone:
            with suppress(BrokenPipeError):
                self._fork_server.kill(request.number, request.signal)

    def reports(self) -> list[WorkerStarted | WorkerExited]:
        """Of members that started and ended. EOFError, once, if their fork server is gone."""
        found: list[WorkerStarted | WorkerExited] = []
        if self.gone:
            return found
        while (report := self._fork_server.next_report(0)) is not None:
            assert isinstance(report, WorkerStarted | WorkerExited)
            found.append(report)
        return found

    def describe_loss(self) -> str:
        how = describe_exit(self._fork_server.close())
        return f"lost the process that its ranks are forked from, which {how}"

    def end(self, how: str) -> bool:
        """End all; False if they had ended before."""
        self._fork_server.close()
        was_there, self.gone = not self.gone, self.gone or how
        return was_there

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Signals to the agent are for the run, by `forward_stop`."""
        handlers = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def forward_stop(self) -> RunEnded | None:
        """The first signal asks the members here, and so all, for a clean stop. A second one, or
        one before there are members, ends this host's part now: how, if so."""
        if len(self._signals) == self._num_forwarded:
            return None
        self._num_forwarded = len(self._signals)
        if len(self._signals) > 1 or self.gone or not self._fork_server.pids:
            return RunEnded(128 + self._signals[-1], "this host's part was interrupted")
        self._tell("the run is asked to stop after a step; the same signal again ends at once")
        with suppress(BrokenPipeError):
            for member in self._fork_server.pids:
                self._fork_server.kill(member, signal.SIGTERM)
        return None

    @property
    def last_signal(self) -> str:
        return signal.Signals(self._signals[-1]).name if self._signals else ""

    def logs(self, recipe_log: Path) -> list[HostLog]:
        """What the first host does not see of the logs: the end of each, within a bound."""
        others = [] if self._own_logs is None else sorted(self._own_logs.glob("*.log"))
        found, left = [], MOST_LOGS_BYTES
        for path in (recipe_log, *others):
            content = _end_of(path, min(MOST_LOG_BYTES, left))
            left -= len(content)
            name = f"recipe-{socket.gethostname()}.log" if path == recipe_log else path.name
            if content or path != recipe_log:  # events name the logs of members
                found.append(HostLog(name, content))
        return found


def _end_of(path: Path, num_bytes: int) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        return file.read(num_bytes)
    return b""
