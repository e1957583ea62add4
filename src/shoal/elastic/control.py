"""How a command reaches a run that goes on: a socket in its directory, for its owner alone.

A caller sends one line of JSON and gets one when what it asked for is done, or refused. Nothing
here waits: the supervisor has ranks to look after. Loads nothing heavy, for commands' sake.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError, sendable
from shoal.storage.decoding import decode_json, in_utf8, json_or_none

NAME = "control"
MOST_BYTES = 65_536
MOST_CALLERS = 32


class Request(msgspec.Struct, frozen=True):
    """What a command asks for."""

    resize: str = ""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was done, in the words of the event `resized`."""

    step: int
    plan: str
    change: str
    bytes: int
    ms: float
    lost: str


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was done, or why it was refused."""

    done: Change | None = None
    refused: str = ""


class Caller:
    """One command that waits for an answer; it may have gone away."""

    def __init__(self, line: socket.socket):
        self.line, self.heard = line, b""

    def answer(self, answer: Answer) -> None:
        with suppress(OSError):  # nobody waits any more
            self.line.send(msgspec.json.encode(answer) + b"\n")
        self.line.close()

    def refuse(self, why: str) -> None:
        self.answer(Answer(refused=sendable(why)))


class Control:
    """The run's end of it. Its directory is locked by the run, so whatever stood there is old."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / NAME
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(run_dir) as path:
            self._socket.bind(path)
            os.chmod(path, 0o600)  # whatever the umask, and before anybody can come in
        self._socket.listen(MOST_CALLERS)
        self._socket.setblocking(False)
        self._callers: list[Caller] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def requests(self) -> Iterator[tuple[Caller, Request]]:
        """What was asked since the last time, by whom. Who asks for nonsense is told so."""
        with suppress(OSError):
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
            asked = json_or_none(caller.heard, Request)
            if asked is None:
                caller.refuse("This is no request. Use the same version of Shoal.")
                continue
            yield caller, asked

    def close(self) -> None:
        for caller in self._callers:
            caller.refuse("The run is over.")
        self._socket.close()
        with suppress(OSError):  # of a disk that cannot be written any more
            self._path.unlink(missing_ok=True)


def ask(run_dir: Path, **what: str) -> dict[str, Any]:
    """Ask the run that goes on in a directory, and wait for its answer: what was done, in the words
    of the event, or `refused`."""
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
            line.sendall(in_utf8(what) + b"\n")
            content = answers.readline(MOST_BYTES)
    if not content:
        raise UsageError(f"The run in {run_dir} ended before it answered.")
    same = "Use the same version of Shoal."
    answer = decode_json(content, Answer, f"The answer of the run in {run_dir}", way_out=same)
    if answer.done is None:
        return {"refused": answer.refused or "The run refused it, and gave no reason."}
    return msgspec.structs.asdict(answer.done)


@contextmanager
def _short(run_dir: Path) -> Iterator[str]:
    """The socket's path in a form short enough for the system, however deep the directory."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{NAME}"
    finally:
        os.close(directory)
