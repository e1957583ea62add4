"""A fork server: a warm process from which the members of a run are forked in milliseconds.

The fork server imports torch, loads the recipe and builds the model once. Each member is a fork of
it, so no member imports anything, and all share the pages of the first weights. It is forked before
its parent starts a thread, and stays single-threaded, because forking a process with threads is not
safe. If the parent dies, the kernel kills the fork server, and with it the members.

Linux only (pidfd, parent-death signal). A model that touches CUDA while it is built cannot be
forked. Read next: `processes.py`, `cluster/local.py`.
"""

import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from shoal.errors import ShoalError, UsageError, sendable
from shoal.system.processes import (
    describe_exit,
    die_with_parent,
    inherit_descriptors,
    let_idle_threads_sleep,
    readable,
    stop_signals,
)
from shoal.system.traces import user_traceback

_MOST_BYTES = 1 << 20
_DUMP_STACK = signal.SIGURG  # ignored by a process without a handler
LOST = "the process that ranks are forked from is gone"


class WorkerSpec(msgspec.Struct, frozen=True):
    """A worker to spawn: its number, the file for its output, variables for its main, and the host
    of the run that it is on."""

    number: int
    log: str
    variables: dict[str, str]
    host: int = 0


class SignalWorker(msgspec.Struct, frozen=True, tag="signal"):
    number: int
    signal: int


class SpawnWorker(msgspec.Struct, frozen=True, tag="spawn"):
    spec: WorkerSpec


class ForkServerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The fork server is prepared; `facts` is what the preparation returned."""

    facts: dict[str, Any]


class PreparationFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The preparation failed; `trace` is the traceback, if the recipe is the cause."""

    message: str
    trace: str
    exit_code: int


class WorkerStarted(msgspec.Struct, frozen=True, tag="started"):
    number: int
    pid: int


class WorkerExited(msgspec.Struct, frozen=True, tag="exited"):
    """`status` is the exit code, or minus the signal."""

    number: int
    status: int


class HostLost(msgspec.Struct, frozen=True, tag="host-lost"):
    """A host of the run is gone with all of its workers, of which no other report comes."""

    host: int
    how: str


class HostJoined(msgspec.Struct, frozen=True, tag="host-joined"):
    """Another host is there, under a number that none had before, with room for `num_slots`."""

    host: int
    num_slots: int


Report = ForkServerReady | PreparationFailed | WorkerStarted | WorkerExited | HostLost | HostJoined
WorkerMain = Callable[[WorkerSpec], int]
Prepare = Callable[[], tuple[dict[str, Any], WorkerMain]]


class Processes(Protocol):
    """The processes of a run, known by number, wherever they are; the supervisor drives them."""

    @property
    def pids(self) -> dict[int, int]:
        """The pids of running processes, by number."""
        ...

    @property
    def poll_sources(self) -> list[Any]:
        """Sockets to poll for reports."""
        ...

    def spawn(self, spec: WorkerSpec) -> None: ...

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None: ...

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """The next report; None if none came in time. Raises EOFError if no more will come."""
        ...

    def describe_loss(self) -> str:
        """Why no more reports will come."""
        ...

    def close(self) -> object:
        """Kill all that still run."""
        ...


class ForkServer:
    """The parent's end of the fork server. Make it before starting any thread."""

    def __init__(self, prepare: Prepare, log: Path, start: "Start | None" = None):
        """`prepare` runs in the fork server, with its output in `log`, and returns the main.

        `start` starts its process; by default this process is forked.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log, self._log_begin = log, log.stat().st_size if log.exists() else 0
        with theirs:
            self.pid = (start or fork_here())((ours, theirs), prepare, log)
        self._socket = ours
        self._reports = msgspec.msgpack.Decoder(Report)
        self._pids: dict[int, int] = {}
        self._status: int | None = None  # of the fork server, once it has ended

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pids(self) -> dict[int, int]:
        """The pids of its workers, by number."""
        return self._pids

    @property
    def poll_sources(self) -> list[Any]:
        """Sockets to poll for reports."""
        return [self]

    def spawn(self, spec: WorkerSpec) -> None:
        self._socket.send(msgspec.msgpack.encode(SpawnWorker(spec)))

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None:
        """The fork server signals its own child, whose pid cannot have been reused."""
        self._socket.send(msgspec.msgpack.encode(SignalWorker(number, signal_number)))

    def dump_stack(self) -> None:
        """Let the fork server write its stack into its log; only before its first report."""
        os.kill(self.pid, _DUMP_STACK)

    def end_of_log(self, num_bytes: int) -> str:
        """The last that the preparation wrote, without what an earlier one left in its log."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_begin, size - num_bytes))
                return sendable(file.read(num_bytes).decode(errors="replace"))
        except OSError:
            return ""

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """The next report; None if none came in time. Raises EOFError when the server has ended."""
        if not readable([self._socket.fileno()], timeout_s):
            return None
        try:
            content = self._socket.recv(_MOST_BYTES)
        except ConnectionResetError:  # it ended before it had read all requests
            content = b""
        if not content:
            raise EOFError(LOST)
        report: Report = self._reports.decode(content)
        match report:
            case WorkerStarted():
                self._pids[report.number] = report.pid
            case WorkerExited():
                self._pids.pop(report.number, None)
        return report

    def close(self) -> int:
        """Kill the fork server and with it its workers. Returns its exit code, or minus the signal.

        Only the first call signals: the pid may be another process's afterwards.
        """
        if self._status is None:
            self._socket.close()
            self._status = -signal.SIGKILL
            with suppress(ProcessLookupError, ChildProcessError):  # where no zombies are kept
                os.kill(self.pid, signal.SIGKILL)  # without effect if it has ended
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def describe_loss(self) -> str:
        """Why no more reports will come, once it has ended."""
        return (
            f"{LOST}: it {describe_exit(self.close())} "
            "(for want of memory, perhaps: the system's log says so then). Go on with --resume"
        )


def redirect_output(log: str | Path) -> None:
    """Send standard output and errors to a file, and read input from /dev/null.

    On a full disk the output is lost, and the worker continues.
    """
    _flush_output()
    try:
        output = open(log, "ab", buffering=0)  # noqa: SIM115
    except OSError:
        output = open(os.devnull, "ab", buffering=0)  # noqa: SIM115
    with output as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = _writing_to(sys.stdout, 1), _writing_to(sys.stderr, 2)


def _writing_to(stream: Any, descriptor: int) -> Any:
    """The stream, line by line, if it writes to this descriptor. One that a program put in its
    place (a notebook's, a StringIO) is of the parent: what is written there would be lost."""
    with suppress(ValueError, OSError):  # it is closed
        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor:
            stream.reconfigure(line_buffering=True)
            return stream
    return open(
        descriptor,
        "w",
        buffering=1,
        encoding="utf-8",
        errors="backslashreplace",
        closefd=False,
    )


def _flush_output() -> None:
    """Or a forked process would write it once more. A stream may be none, or closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):
            if stream is not None:
                stream.flush()


def run_and_exit(main: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run the main of a forked process and exit; never returns into the parent's code."""
    status = 1
    try:
        status = main(*arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 (the process ends here)
        traceback.print_exc()
    finally:
        try:
            _flush_output()
        finally:
            os._exit(status & 0xFF)


Ends = tuple[socket.socket, socket.socket]  # of the parent, of the fork server
Start = Callable[[Ends, Prepare, Path], int]  # returns the pid


def fork_here(when_lost: int = signal.SIGKILL) -> Start:
    """Fork this process, which must have no other threads.

    `when_lost` is the signal that workers get when the fork server is gone.
    """

    def start(ends: Ends, prepare: Prepare, log: Path) -> int:
        _flush_output()
        parent = os.getpid()
        with inherit_descriptors():
            pid = os.fork()
        if pid == 0:
            ends[0].close()
            run_and_exit(run_fork_server, ends[1], prepare, log, parent, when_lost)
        return pid

    return start


def run_fork_server(
    control: socket.socket, prepare: Prepare, log: Path, parent: int, when_lost: int
) -> int:
    """The main of the fork server. It ends with its parent, and then its workers get a signal."""
    die_with_parent(parent)
    with suppress(PermissionError):  # of a process that leads a session
        os.setpgid(0, 0)  # a terminal's Ctrl-C is the parent's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A signal to all processes of a job asks for a clean stop, which needs the ranks; the parent
    # ends this process. Not SIG_IGN: processes that a recipe starts would inherit it.
    for number in stop_signals()[1:]:
        signal.signal(number, lambda *_: None)
    redirect_output(log)
    faulthandler.register(_DUMP_STACK, file=2)
    if "torch" not in sys.modules:  # or it is too late, and others would rely on it
        let_idle_threads_sleep()
    try:
        facts, worker_main = prepare()
        _check_forkable()
    except ShoalError as error:
        return _report_failure(control, str(error), trace_of_cause(error), error.exit_code)
    except BaseException as error:  # noqa: BLE001 (the recipe may fail in any way)
        last = traceback.format_exception_only(error)[-1].strip()
        return _report_failure(control, last, user_traceback(error), 1)
    faulthandler.unregister(_DUMP_STACK)
    gc.collect()
    gc.freeze()  # so that a collection in a child does not touch, and so copy, every page
    control.send(msgspec.msgpack.encode(ForkServerReady(facts)))
    return _ForkLoop(control, worker_main, when_lost).serve()


def _report_failure(control: socket.socket, message: str, trace: str, exit_code: int) -> int:
    """Report why the preparation failed; only the ends of long texts fit into a message."""
    report = PreparationFailed(sendable(message)[-8_000:], sendable(trace)[-32_000:], exit_code)
    control.send(msgspec.msgpack.encode(report))
    return 0


def trace_of_cause(error: ShoalError) -> str:
    """The traceback, if the recipe's code is the cause of the error."""
    if needs_no_traceback(error) or error.__cause__ is None:
        return ""
    return user_traceback(error.__cause__)


def needs_no_traceback(error: BaseException) -> bool:
    """Whether an error's message is enough: Shoal's own, without a cause or with one of the system
    (a full disk, a server that is gone)."""
    if not isinstance(error, ShoalError):
        return False
    cause = error.__cause__
    if cause is None or not error.shows_cause or needs_no_traceback(cause):
        return True
    return isinstance(error, UsageError) and isinstance(cause, OSError)


def _check_forkable() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UsageError(
            "The recipe used CUDA while it was loaded or while its model was built, and a process "
            "that did cannot be forked. Build the model on the CPU; each rank moves it."
        )


class _ForkLoop:
    """The fork server's loop: spawn, signal and reap workers until the parent closes its end."""

    def __init__(self, control: socket.socket, worker_main: WorkerMain, when_lost: int):
        self._control = control
        self._when_lost = when_lost
        self._worker_main = worker_main
        self._workers: dict[int, tuple[int, int]] = {}  # number -> (pid, pidfd)
        self._requests = msgspec.msgpack.Decoder(SpawnWorker | SignalWorker)

    def serve(self) -> int:
        while True:
            watched = {pidfd: number for number, (_, pidfd) in self._workers.items()}
            ready = readable([self._control.fileno(), *watched])
            for pidfd in watched.keys() & set(ready):
                self._reap(watched[pidfd])
            if self._control.fileno() in ready:
                content = self._control.recv(_MOST_BYTES)
                if not content:
                    return 0  # the kernel signals the children
                request = self._requests.decode(content)
                if isinstance(request, SpawnWorker):
                    self._spawn(request.spec)
                elif request.number in self._workers:
                    os.kill(self._workers[request.number][0], request.signal)

    def _spawn(self, spec: WorkerSpec) -> None:
        parent = os.getpid()
        # A signal to a worker waits until the worker's own handlers are in place.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
        with inherit_descriptors():
            pid = os.fork()
        if pid == 0:
            run_and_exit(self._run_worker, spec, parent, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._workers[spec.number] = (pid, os.pidfd_open(pid))
        self._control.send(msgspec.msgpack.encode(WorkerStarted(spec.number, pid)))

    def _run_worker(self, spec: WorkerSpec, parent: int, mask: set[signal.Signals]) -> int:
        die_with_parent(parent, self._when_lost)
        for number in stop_signals()[1:]:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control.close()
        for _, pidfd in self._workers.values():
            os.close(pidfd)
        redirect_output(spec.log)
        return self._worker_main(spec)

    def _reap(self, number: int) -> None:
        pid, pidfd = self._workers.pop(number)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._control.send(msgspec.msgpack.encode(WorkerExited(number, code)))
