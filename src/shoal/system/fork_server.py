"""Processes that start in milliseconds: a warm process from which ranks are forked.

The nursery imports torch, loads the recipe and builds the model once; each rank is then a fork of
it, so no rank imports anything and the first weights are the same pages in all of them. It is a
process of its own, forked before its parent starts a thread, and stays single-threaded, because
forking a process with threads is not safe. If the parent dies the kernel kills the nursery, and
with it the ranks.

Linux only (pidfd, parent-death signal). A model that touches CUDA while it is built cannot be
forked.
"""

import faulthandler
import gc
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
from shoal.system.processes import die_with_parent, handing_on, how_it_ended, readable, stop_signals

_MOST_BYTES = 1 << 20
_SAY_WHERE = signal.SIGURG  # without effect on a process that does not listen to it


class Birth(msgspec.Struct, frozen=True):
    """What a child is told: its number, where its output goes, and what else it needs; and on
    which host of the run it is born."""

    number: int
    log: str
    told: dict[str, str]
    host: int = 0


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    number: int
    signal: int


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    birth: Birth


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The nursery is ready to bear; `facts` is what its preparation found out."""

    facts: dict[str, Any]


class NotPrepared(msgspec.Struct, frozen=True, tag="not-prepared"):
    """The preparation failed, by the recipe's fault (`trace` is not empty) or another's."""

    message: str
    trace: str
    exit_code: int


class Born(msgspec.Struct, frozen=True, tag="born"):
    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """`status` is the exit code, or minus the signal."""

    number: int
    status: int


Report = Prepared | NotPrepared | Born | Exited
ChildMain = Callable[[Birth], int]
Prepare = Callable[[], tuple[dict[str, Any], ChildMain]]


class Processes(Protocol):
    """What the supervisor drives: processes that start and end somewhere, known by numbers."""

    @property
    def pids(self) -> dict[int, int]:
        """Of those that run, by number."""
        ...

    @property
    def ears(self) -> list[Any]:
        """What to poll for reports."""
        ...

    def spawn(self, birth: Birth) -> None: ...

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None: ...

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """What happened; None if nothing did in time. Raises EOFError if no more will come."""
        ...

    def why_gone(self) -> str:
        """Why there are no reports any more."""
        ...

    def close(self) -> object:
        """End all that still run."""
        ...


class Nursery:
    """The parent's end. Make it before starting any thread."""

    def __init__(self, prepare: Prepare, log: Path):
        """Fork; `prepare` runs there, its output going to `log`, and gives the children's main."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with handing_on():
            self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            exit_with(_main, theirs, prepare, log, parent)
        theirs.close()
        self._socket = ours
        self._reports = msgspec.msgpack.Decoder(Report)
        self._pids: dict[int, int] = {}
        self._status: int | None = None  # once it has ended

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pids(self) -> dict[int, int]:
        """Of its children, by number."""
        return self._pids

    @property
    def ears(self) -> list[Any]:
        """What to poll for reports."""
        return [self]

    def spawn(self, birth: Birth) -> None:
        self._socket.send(msgspec.msgpack.encode(Spawn(birth)))

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None:
        """Through the nursery, whose child the process is: its number cannot have been reused."""
        self._socket.send(msgspec.msgpack.encode(Kill(number, signal_number)))

    def say_where(self) -> None:
        """Let it write into its log at which line it is; only before its first report."""
        os.kill(self.pid, _SAY_WHERE)

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """What happened; None if nothing did in time. Raises EOFError when the nursery is gone."""
        if not readable([self._socket.fileno()], timeout_s):
            return None
        try:
            content = self._socket.recv(_MOST_BYTES)
        except ConnectionResetError:  # it ended before it had read all orders
            content = b""
        if not content:
            raise EOFError("the process that ranks are forked from is gone")
        report: Report = self._reports.decode(content)
        match report:
            case Born():
                self._pids[report.number] = report.pid
            case Exited():
                self._pids.pop(report.number, None)
        return report

    def close(self) -> int:
        """End the nursery, and with it its children; its exit code, or minus the signal.

        Only the first time: its number may be another process's afterwards.
        """
        if self._status is None:
            self._socket.close()
            self._status = -signal.SIGKILL
            with suppress(ProcessLookupError, ChildProcessError):  # where nobody keeps the dead
                os.kill(self.pid, signal.SIGKILL)  # of no effect on one that has ended
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def why_gone(self) -> str:
        """Why there are no reports any more, once it is gone."""
        return (
            f"the process that ranks are forked from is gone: it {how_it_ended(self.close())} (for "
            "want of memory, perhaps: the system's log says so then). Go on with --resume"
        )


def redirect_output(log: str | Path) -> None:
    """Send standard output and error to a file, and take input from nowhere.

    A disk that takes no more files must not cost a run its ranks: their output is lost then.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        output = open(log, "ab", buffering=0)  # noqa: SIM115
    except OSError:
        output = open(os.devnull, "ab", buffering=0)  # noqa: SIM115
    with output as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def exit_with(main: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run a forked process to its end without returning into the parent's code."""
    status = 1
    try:
        status = main(*arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 (the end of a process: there is nobody to raise to)
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


def _main(control: socket.socket, prepare: Prepare, log: Path, parent: int) -> int:
    die_with_parent(parent)
    os.setpgid(0, 0)  # a terminal's Ctrl-C is the parent's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whoever signals all processes of a job at once asks for a clean stop, which takes ranks; the
    # parent ends this process. Not ignored: what a recipe starts would ignore it too.
    for number in stop_signals()[1:]:
        signal.signal(number, lambda *_: None)
    redirect_output(log)
    faulthandler.register(_SAY_WHERE, file=2)
    try:
        facts, child_main = prepare()
        _check_forkable()
    except ShoalError as error:
        return _refuse(control, str(error), _trace_of(error), error.exit_code)
    except BaseException as error:  # noqa: BLE001 (the recipe may fail in any way)
        last = traceback.format_exception_only(error)[-1].strip()
        return _refuse(control, last, traceback.format_exc(), 1)
    faulthandler.unregister(_SAY_WHERE)
    gc.collect()
    gc.freeze()  # so that a collection in a child does not touch, and so copy, every page
    control.send(msgspec.msgpack.encode(Prepared(facts)))
    return _Bearing(control, child_main).serve()


def _refuse(control: socket.socket, message: str, trace: str, exit_code: int) -> int:
    """Say why there will be no children; the ends of long texts, since a message has a limit."""
    report = NotPrepared(sendable(message)[-8_000:], sendable(trace)[-32_000:], exit_code)
    control.send(msgspec.msgpack.encode(report))
    return 0


def _trace_of(error: ShoalError) -> str:
    """The traceback, if the recipe's code is the cause of the error."""
    if says_all(error):
        return ""
    return "".join(traceback.format_exception(error.__cause__))


def says_all(error: BaseException) -> bool:
    """Whether the words of an error do without a traceback: ours, of nothing or of the system's
    (a full disk, say, or a server that is gone)."""
    if not isinstance(error, ShoalError):
        return False
    cause = error.__cause__
    if cause is None or not error.shows_cause or says_all(cause):
        return True
    return isinstance(error, UsageError) and isinstance(cause, OSError)


def _check_forkable() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UsageError(
            "The recipe used CUDA while it was loaded or while its model was built, and a process "
            "that did cannot be forked. Build the model on the CPU; each rank moves it."
        )


class _Bearing:
    """The nursery's loop: spawn, kill, and report who ended, until the parent's end is closed."""

    def __init__(self, control: socket.socket, child_main: ChildMain):
        self._control = control
        self._child_main = child_main
        self._children: dict[int, tuple[int, int]] = {}  # number -> (pid, pidfd)
        self._orders = msgspec.msgpack.Decoder(Spawn | Kill)

    def serve(self) -> int:
        while True:
            watched = {pidfd: number for number, (_, pidfd) in self._children.items()}
            ready = readable([self._control.fileno(), *watched])
            for pidfd in watched.keys() & set(ready):
                self._bury(watched[pidfd])
            if self._control.fileno() in ready:
                content = self._control.recv(_MOST_BYTES)
                if not content:
                    return 0  # the kernel kills the children with us
                order = self._orders.decode(content)
                if isinstance(order, Spawn):
                    self._bear(order.birth)
                elif order.number in self._children:
                    os.kill(self._children[order.number][0], order.signal)

    def _bear(self, birth: Birth) -> None:
        parent = os.getpid()
        with handing_on():
            pid = os.fork()
        if pid == 0:
            exit_with(self._live, birth, parent)
        self._children[birth.number] = (pid, os.pidfd_open(pid))
        self._control.send(msgspec.msgpack.encode(Born(birth.number, pid)))

    def _live(self, birth: Birth, parent: int) -> int:
        die_with_parent(parent)
        for number in stop_signals()[1:]:
            signal.signal(number, signal.SIG_DFL)
        self._control.close()
        for _, pidfd in self._children.values():
            os.close(pidfd)
        redirect_output(birth.log)
        return self._child_main(birth)

    def _bury(self, number: int) -> None:
        pid, pidfd = self._children.pop(number)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        self._control.send(msgspec.msgpack.encode(Exited(number, code)))
