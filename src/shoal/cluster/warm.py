"""A process kept warm between commands, so that the next `shoal train` need not import torch.

`shoal warm start` puts it in the background; it forks itself for each command it is handed, with
the caller's terminal, directory and environment, and leaves after an hour without work. The
caller passes signals on and gets the exit code; if it dies, the command dies with it. The socket
is in a directory that only its owner can enter, under a name that changes with the code, so a
stale process is not used.

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
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.processes import readable, stop_signals

IDLE_S = 3600.0
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
    "shoal.cluster.launch",
    "shoal.elastic.worker",
    "shoal.verify",
)


def socket_path() -> Path:
    """Where the warm process for this interpreter and this code listens."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/shoal-{os.getuid()}"
    package = Path(__file__).resolve().parents[1]
    newest = max(entry.stat().st_mtime_ns for entry in package.rglob("*.py"))
    identity = f"{sys.executable}|{package}|{newest}"
    return Path(base) / "shoal" / f"warm-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.sock"


def run_warm(arguments: list[str]) -> int | None:
    """Have the warm process run a command; None if there is none."""
    connection = _connect()
    if connection is None:
        return None
    request = {"arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ)}
    content = json.dumps(request).encode()
    with connection:
        socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(content)
        answers = connection.makefile("r")
        pid = int(json.loads(answers.readline())["pid"])
        for number in stop_signals():
            signal.signal(number, lambda n, _: os.kill(pid, n))
        line = answers.readline()
        if not line:
            print("shoal: the warm process ended under this command.", file=sys.stderr)
            return 1
        return int(json.loads(line)["status"])


def start(idle_s: float = IDLE_S) -> bool:
    """Start the warm process and wait until it answers; False if it was up already."""
    path = socket_path()
    if is_up(path):
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_open_directory(path.parent)
    log = path.with_suffix(".log")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:
        child = subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.warm", str(path), str(idle_s)],
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
            raise OSError(f"the warm process did not come up:\n{log.read_text()}")
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
    try:
        connection.connect(str(path or socket_path()))
        return connection
    except OSError:
        connection.close()
        return None


def _refuse_open_directory(path: Path) -> None:
    facts = path.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise OSError(f"{path} can be entered by others; remove it and try again")


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
            return self._answer(self._listener.accept()[0])
        return bool(ready)

    def _answer(self, caller: socket.socket) -> bool:
        """Run a caller's command in a fork; False when asked to end."""
        caller.settimeout(5.0)
        try:
            head, descriptors, _, _ = socket.recv_fds(caller, 8, 3)
            if len(head) < 8:  # only asked whether we are here
                caller.close()
                return True
            length = int.from_bytes(head, "big")
            if length == 0:
                caller.close()
                return False
            content = b""
            while len(content) < length and (part := caller.recv(length - len(content))):
                content += part
            request = json.loads(content)
        except (OSError, ValueError):
            caller.close()
            return True
        caller.settimeout(None)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors, caller, parent)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children[os.pidfd_open(pid)] = (pid, caller)
        _tell(caller, pid=pid)
        return True

    def _become(
        self,
        request: dict[str, Any],
        descriptors: list[int],
        caller: socket.socket,
        parent: int,
    ) -> None:
        """In the fork: turn into the caller's command."""
        from shoal.cluster.nursery import exit_with
        from shoal.processes import die_with_parent

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
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
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
