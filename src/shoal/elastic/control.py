"""How a command reaches a run that goes on: a socket in its directory, for its owner alone.

A caller sends one line of JSON and gets one when what it asked for is done, or refused. Nothing
here waits: the supervisor has ranks to look after. Loads nothing heavy, for commands' sake.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.errors import UsageError

NAME = "control"
MOST_BYTES = 65_536
MOST_CALLERS = 32


class Caller:
    """One command that waits for an answer; it may have gone away."""

    def __init__(self, line: socket.socket):
        self.line, self.heard = line, b""

    def answer(self, **what: Any) -> None:
        with suppress(OSError):  # nobody waits any more
            self.line.send(json.dumps(what).encode() + b"\n")
        self.line.close()


class Control:
    """The run's end of it. Its directory is locked by the run, so whatever stood there is old."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / NAME
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with _short(run_dir) as path:
                self._socket.bind(path)
        finally:
            os.umask(before)
        self._socket.listen(MOST_CALLERS)
        self._socket.setblocking(False)
        self._callers: list[Caller] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def requests(self) -> Iterator[tuple[Caller, dict[str, Any]]]:
        """What was asked since the last time, by whom. Who asks for nonsense is told so."""
        with suppress(BlockingIOError):
            while len(self._callers) < MOST_CALLERS:
                line, _ = self._socket.accept()
                line.setblocking(False)
                self._callers.append(Caller(line))
        for caller in list(self._callers):
            try:
                content = caller.line.recv(MOST_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                content = b""
            caller.heard += content
            if content and b"\n" not in caller.heard and len(caller.heard) < MOST_BYTES:
                continue
            self._callers.remove(caller)
            try:
                asked = json.loads(caller.heard)
                if not isinstance(asked, dict):
                    raise ValueError("no object")
            except ValueError:
                caller.answer(refused="This is no request. Use the same version of Shoal.")
                continue
            yield caller, asked

    def close(self) -> None:
        for caller in self._callers:
            caller.answer(refused="The run is over.")
        self._socket.close()
        with suppress(OSError):  # of a disk that cannot be written any more
            self._path.unlink(missing_ok=True)


def ask(run_dir: Path, **what: Any) -> dict[str, Any]:
    """Ask the run that goes on in a directory, and wait for its answer."""
    if not (run_dir / "run.json").exists():
        raise UsageError(f"{run_dir} holds no run. Give the directory of one, as in runs/name-1.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            with _short(run_dir) as path:
                line.connect(path)
        except OSError as error:
            raise UsageError(
                f"The run in {run_dir} cannot be asked ({error.strerror}): it is over, or was "
                "started by another user. Only a run of `shoal train` that goes on can be."
            ) from error
        content = b""
        with suppress(ConnectionError), line.makefile("rb") as answers:  # the same as no answer
            line.sendall(json.dumps(what).encode() + b"\n")
            content = answers.readline()
    if not content:
        raise UsageError(f"The run in {run_dir} ended before it answered.")
    found: dict[str, Any] = json.loads(content)
    return found


@contextmanager
def _short(run_dir: Path) -> Iterator[str]:
    """The socket's path in a form short enough for the system, however deep the directory."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{NAME}"
    finally:
        os.close(directory)
