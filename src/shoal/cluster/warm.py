"""A process kept warm between commands, so that the next `shoal train` need not import torch.

`shoal warm start` puts it in the background; it forks itself for each command it is handed, with
the caller's terminal, directory and environment, and leaves after an hour without work. The
caller passes signals on and gets the exit code; if it dies, the command dies with it. The socket
is in a directory that only its owner can enter, under a name that changes with the code, so a
stale process is not used. Both sides look whose process the other one is: a caller hands over its
environment. A command with a closed stream, or in a locale other than UTF-8, runs by itself.

This module is also what the client side imports, so it loads nothing heavy.
"""

import gc
import hashlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TypedDict

from shoal.comm.unix import is_own
from shoal.storage.files import private_directory, write_private
from shoal.system.processes import readable, stop_signals

IDLE_S = 3600.0
ANSWER_S = 5.0  # for a caller to say what it wants
MOST_BYTES = 64 << 20  # of arguments and environment
Command = Callable[[list[str]], int]
_PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "zmq",
    "rich.console",
    "shoal.cli.train",
    "shoal.cli.run",
    "shoal.cli.verify",
    "shoal.cli.display",
    "shoal.launch",
    "shoal.elastic.worker",
    "shoal.verify",
)


class _Request(TypedDict):
    """A command, and what it has from its caller."""

    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    umask: int
    streams: list[tuple[str, str]]  # the encoding of output and of errors, and what it cannot hold


def socket_path() -> Path:
    """Where the warm process for this interpreter and this code listens."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/shoal-{os.getuid()}"
    package = Path(__file__).resolve().parents[1]
    newest = max(entry.stat().st_mtime_ns for entry in package.rglob("*.py"))
    identity = f"{sys.executable}|{package}|{newest}"
    return Path(base) / "shoal" / f"warm-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.sock"


def run_warm(arguments: list[str]) -> int | None:
    """Have the warm process run a command; None if there is none, or none that could."""
    content = _request(arguments)
    connection = None if content is None else _connect()
    if content is None or connection is None:
        return None
    with connection:
        try:
            socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
            connection.sendall(content)
        except OSError:  # it has just ended, before it knew what to do
            return None
        answers = connection.makefile("rb")
        pid = _told(answers.readline(), "pid")
        if pid is not None:
            for number in stop_signals():
                signal.signal(number, lambda n, _: os.kill(pid, n))
            status = _told(answers.readline(), "status")
            if status is not None:
                return status
        print("shoal: the warm process ended under this command.", file=sys.stderr)
        return 1


def _request(arguments: list[str]) -> bytes | None:
    """A command with all that is its caller's; None if it had better run by itself."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if sys.getfilesystemencoding().lower() != "utf-8":
        return None  # the names of its files would be others there
    if any(stream is None or stream.closed for stream in streams):
        return None  # what is opened next would take the place of it
    try:
        request = _Request(
            arguments=arguments,
            cwd=os.getcwd(),
            environment=dict(os.environ),
            umask=_umask(),
            streams=[(stream.encoding, stream.errors or "strict") for stream in streams[1:]],
        )
    except OSError:  # the directory is gone
        return None
    return json.dumps(request).encode()


def _umask() -> int:
    """The system tells it only to who sets one; nothing else runs here meanwhile."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _told(line: bytes, name: str) -> int | None:
    """A number that the warm process tells; None if it is gone."""
    try:
        return int(json.loads(line)[name])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def start(idle_s: float = IDLE_S) -> bool:
    """Start the warm process and wait until it answers; False if it was up already."""
    path = socket_path()
    if is_up(path):
        return False
    private_directory(path.parent, "Remove it and try again, or set XDG_RUNTIME_DIR.")
    log = path.with_suffix(".log")
    # In UTF-8 whatever the locale is here: commands of other locales do not come to it.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    log.unlink(missing_ok=True)
    write_private(log, b"")
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "shoal.cli.warm", str(path), str(idle_s)],
            stdin=nothing,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    deadline = time.monotonic() + 60.0
    while not is_up(path):
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            said = log.read_text(errors="replace")
            raise OSError(f"the warm process did not come up:\n{said}")
        time.sleep(0.02)
    return True


def stop() -> bool:
    """End the warm process; False if there was none."""
    connection = _connect()
    if connection is None:
        return False
    with connection:
        connection.sendall((0).to_bytes(8, "big"))
        connection.recv(1)  # until it closes
    return True


def is_up(path: Path | None = None) -> bool:
    connection = _connect(path)
    if connection is not None:
        connection.close()
    return connection is not None


def _connect(path: Path | None = None) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_S)
    with suppress(OSError):
        connection.connect(str(path or socket_path()))
        if is_own(connection):
            connection.settimeout(None)
            return connection
    connection.close()
    return None


class Warm:
    """The process itself: single-threaded, so that it may fork."""

    def __init__(self, path: Path, idle_s: float, command: Command):
        self._path = path
        self._idle_s = idle_s
        self._command = command
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, caller

    def serve(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)  # before it listens, so nobody comes in between
        self._listener.listen(16)
        try:
            while self._serve_one():
                continue
        finally:
            self._path.unlink(missing_ok=True)

    def _serve_one(self) -> bool:
        callers = {caller.fileno(): pidfd for pidfd, (_, caller) in self._children.items()}
        watched = [self._listener.fileno(), *self._children, *callers]
        ready = readable(watched, self._idle_s if not callers else None)
        for descriptor in ready:
            if descriptor in self._children:
                self._report_end(descriptor)
            elif callers.get(descriptor) in self._children:
                os.kill(self._children[callers[descriptor]][0], signal.SIGKILL)  # caller is gone
        if self._listener.fileno() in ready:
            try:
                return self._answer(self._listener.accept()[0])
            except OSError:  # the caller has gone, or too many files are open
                return True
        return bool(ready)

    def _answer(self, caller: socket.socket) -> bool:
        """Run a caller's command in a fork; False when asked to end."""
        caller.settimeout(ANSWER_S)
        descriptors: list[int] = []
        try:
            if not is_own(caller):
                raise ValueError("another user's process")
            head, descriptors, _, _ = socket.recv_fds(caller, 8, 3)
            if head == bytes(8):
                caller.close()
                _close(descriptors)
                return False
            request = _read_request(caller, head)
            if len(descriptors) != 3:
                raise ValueError("a command has an input, an output and a place for errors")
        except (OSError, ValueError, RecursionError):  # or only asked whether we are here
            caller.close()
            _close(descriptors)
            return True
        caller.settimeout(None)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors, caller, parent)
        _close(descriptors)
        self._children[os.pidfd_open(pid)] = (pid, caller)
        _tell(caller, pid=pid)
        return True

    def _become(
        self,
        request: _Request,
        descriptors: list[int],
        caller: socket.socket,
        parent: int,
    ) -> None:
        """In the fork: turn into the caller's command."""
        from shoal.system.fork_server import exit_with
        from shoal.system.processes import die_with_parent

        die_with_parent(parent)
        os.setsid()
        self._listener.close()
        caller.close()
        for _, other in self._children.values():
            other.close()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        os.umask(request["umask"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout, sys.stderr = (
            open(number, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
            for number, (encoding, errors) in enumerate(request["streams"], 1)
        )
        sys.stdout.reconfigure(line_buffering=True)
        sys.argv = ["shoal", *request["arguments"]]

        exit_with(self._command, request["arguments"])

    def _report_end(self, pidfd: int) -> None:
        pid, caller = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        _tell(caller, status=code if code >= 0 else 128 - code)
        caller.close()


def _read_request(caller: socket.socket, head: bytes) -> _Request:
    """What a caller wants to be run; ValueError if that is nothing that a command is made of."""
    length = int.from_bytes(head, "big")
    if len(head) < 8 or length > MOST_BYTES:
        raise ValueError("no request")
    content = b""
    while len(content) < length and (part := caller.recv(length - len(content))):
        content += part
    found = _read(content)
    if found is None:
        raise ValueError("no request")
    return found


def _read(content: bytes) -> _Request | None:
    """Python's own JSON, which keeps names that are not UTF-8; None if it is no request."""
    from shoal.storage.decoding import UNREADABLE

    try:
        found: _Request = json.loads(content)
        environment = found["environment"]
        return _Request(
            arguments=[str(word) for word in found["arguments"]],
            cwd=str(found["cwd"]),
            environment={str(name): str(value) for name, value in dict(environment).items()},
            umask=int(found["umask"]) & 0o777,
            streams=[(str(encoding), str(errors)) for encoding, errors in found["streams"][:2]],
        )
    except UNREADABLE:
        return None


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _tell(caller: socket.socket, **what: int) -> None:
    try:
        caller.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        return  # it has gone; its command is ended when that shows


def _ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def serve(path: Path, idle_s: float, command: Command) -> None:
    """Become the warm process: load everything, then serve until idle or stopped."""
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGTERM, _ended)
    Warm(path, idle_s, command).serve()
