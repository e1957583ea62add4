"""A process that stays warm between commands, so that the next `shoal train` need not import torch.

`shoal warm start` starts it in the background. For each command it forks itself, with the client's
terminal, directory and environment, and it exits after an hour without work. The client forwards
signals and gets the exit code; if the client dies, its command is killed. The socket is in a
directory that only its owner can enter, under a name that changes with the code, so a stale process
is not used. Both sides check the other's user, since the client sends its environment. A command
with a closed stream, or in a locale other than UTF-8, runs by itself.

The client imports this module too, so it loads nothing heavy. Read next: `system/fork_server.py`.
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
from shoal.storage.files import make_private_directory, umask, write_private
from shoal.system.processes import readable, stop_signals

IDLE_S = 3600.0
ANSWER_S = 5.0  # for a client's request
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
    "shoal.cli.evaluate",
    "shoal.cli.run",
    "shoal.cli.verify",
    "shoal.events.screen",
    "shoal.launch",
    "shoal.elastic.worker",
    "shoal.verify",
)


class _CommandRequest(TypedDict):
    """A command, and its client's context."""

    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    umask: int
    streams: list[tuple[str, str]]  # encoding and error mode of output and of errors


def socket_path() -> Path:
    """Where the warm process for this interpreter and this code listens."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/shoal-{os.getuid()}"
    package = Path(__file__).resolve().parents[1]
    newest = max(entry.stat().st_mtime_ns for entry in package.rglob("*.py"))
    identity = f"{sys.executable}|{package}|{newest}"
    return Path(base) / "shoal" / f"warm-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.sock"


def run_warm(arguments: list[str]) -> int | None:
    """Run a command in the warm process; None if there is none, or if it cannot."""
    content = _request(arguments)
    connection = None if content is None else _connect()
    if content is None or connection is None:
        return None
    with connection:
        try:
            socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
            connection.sendall(content)
        except OSError:  # it has just ended, before it had the request
            return None
        answers = connection.makefile("rb")
        pid = _read_number(answers.readline(), "pid")
        if pid is not None:
            for number in stop_signals():
                signal.signal(number, lambda n, _: os.kill(pid, n))
            status = _read_number(answers.readline(), "status")
            if status is not None:
                return status
        print("shoal: the warm process ended under this command.", file=sys.stderr)
        return 1


def _request(arguments: list[str]) -> bytes | None:
    """The request for a command; None if the command must run by itself."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if sys.getfilesystemencoding().lower() != "utf-8":
        return None  # file names would be encoded in another way there
    if any(stream is None or stream.closed for stream in streams):
        return None  # the next file opened would take its descriptor
    try:
        request = _CommandRequest(
            arguments=arguments,
            cwd=os.getcwd(),
            environment=dict(os.environ),
            umask=umask(),
            streams=[(stream.encoding, stream.errors or "strict") for stream in streams[1:]],
        )
    except OSError:  # the directory is gone
        return None
    return json.dumps(request).encode()


def _read_number(line: bytes, name: str) -> int | None:
    """A number from a line of the warm process; None if that has ended."""
    try:
        return int(json.loads(line)[name])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def start(idle_s: float = IDLE_S) -> bool:
    """Start the warm process and wait until it answers; False if it was up already."""
    path = socket_path()
    if is_up(path):
        return False
    make_private_directory(path.parent, "Remove it and try again, or set XDG_RUNTIME_DIR.")
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


class WarmServer:
    """The warm process: single-threaded, so that it may fork."""

    def __init__(self, path: Path, idle_s: float, command: Command):
        self._path = path
        self._idle_s = idle_s
        self._command = command
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, client

    def serve(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)  # before it listens
        self._listener.listen(16)
        try:
            while self._serve_one():
                continue
        finally:
            self._path.unlink(missing_ok=True)

    def _serve_one(self) -> bool:
        clients = {client.fileno(): pidfd for pidfd, (_, client) in self._children.items()}
        watched = [self._listener.fileno(), *self._children, *clients]
        ready = readable(watched, self._idle_s if not clients else None)
        for descriptor in ready:
            if descriptor in self._children:
                self._report_end(descriptor)
            elif clients.get(descriptor) in self._children:
                os.kill(self._children[clients[descriptor]][0], signal.SIGKILL)  # it has no client
        if self._listener.fileno() in ready:
            try:
                return self._accept_command(self._listener.accept()[0])
            except OSError:  # the client has gone, or too many files are open
                return True
        return bool(ready)

    def _accept_command(self, client: socket.socket) -> bool:
        """Run a client's command in a fork; False on a request to end."""
        client.settimeout(ANSWER_S)
        descriptors: list[int] = []
        try:
            if not is_own(client):
                raise ValueError("another user's process")
            head, descriptors, _, _ = socket.recv_fds(client, 8, 3)
            if head == bytes(8):
                client.close()
                _close(descriptors)
                return False
            request = _read_request(client, head)
            if len(descriptors) != 3:
                raise ValueError("a command has an input, an output and a place for errors")
        except (OSError, ValueError, RecursionError):  # or a client of `is_up`
            client.close()
            _close(descriptors)
            return True
        client.settimeout(None)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_command(request, descriptors, client, parent)
        _close(descriptors)
        self._children[os.pidfd_open(pid)] = (pid, client)
        _send_number(client, pid=pid)
        return True

    def _run_command(
        self,
        request: _CommandRequest,
        descriptors: list[int],
        client: socket.socket,
        parent: int,
    ) -> None:
        """In the fork: take over the client's context and run its command."""
        from shoal.system.fork_server import run_and_exit
        from shoal.system.processes import die_with_parent

        die_with_parent(parent)
        os.setsid()
        self._listener.close()
        client.close()
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

        run_and_exit(self._command, request["arguments"])

    def _report_end(self, pidfd: int) -> None:
        pid, client = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(status)
        _send_number(client, status=code if code >= 0 else 128 - code)
        client.close()


def _read_request(client: socket.socket, head: bytes) -> _CommandRequest:
    """A client's request; ValueError if it is malformed. Python's own JSON keeps names that are not
    UTF-8."""
    from shoal.storage.decoding import PARSE_ERRORS

    length = int.from_bytes(head, "big")
    if len(head) < 8 or length > MOST_BYTES:
        raise ValueError("no request")
    content = b""
    while len(content) < length and (part := client.recv(length - len(content))):
        content += part
    try:
        found: _CommandRequest = json.loads(content)
        environment = found["environment"]
        return _CommandRequest(
            arguments=[str(word) for word in found["arguments"]],
            cwd=str(found["cwd"]),
            environment={str(name): str(value) for name, value in dict(environment).items()},
            umask=int(found["umask"]) & 0o777,
            streams=[(str(encoding), str(errors)) for encoding, errors in found["streams"][:2]],
        )
    except PARSE_ERRORS as error:
        raise ValueError("no request") from error


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _send_number(client: socket.socket, **what: int) -> None:
    try:
        client.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        return  # it has ended; its command is killed when the socket shows that


def _on_term(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def serve(path: Path, idle_s: float, command: Command) -> None:
    """Become the warm process: load everything, then serve until idle or stopped."""
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGTERM, _on_term)
    WarmServer(path, idle_s, command).serve()
