"""What the commands of a user and the agent of the local queue say to each other, and where.

A command connects to a socket in a directory that this user alone may enter, sends one line of JSON
and receives one. If no agent listens, the command starts one, unless all that it asks is what the
journal says already. A submit has a token, so that asking again after an agent died is no second
job.

Cost: a connection a request; the start of an agent, some 0.2 s, for the first job.
"""

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from shoal import __version__
from shoal.cluster.engine import JobRequest, JobState
from shoal.comm.unix import is_own, reachable
from shoal.errors import UsageError
from shoal.storage.decoding import decode_json, encode_json
from shoal.storage.files import make_private_directory

SOCKET, JOURNAL, LOCK, LOG = "socket", "journal.jsonl", "agent.lock", "agent.log"
MOST_BYTES = 8 << 20
ANSWER_S = 30.0
START_S = 60.0


class QueueRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a command asks of the agent."""

    ask: Literal["submit", "jobs", "stop", "limits"]
    version: str = __version__
    job: int = 0
    now: bool = False
    request: JobRequest | None = None
    python: str = ""
    token: str = ""
    environment: dict[str, str] = {}
    limits: dict[str, str] = {}


class QueueReply(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or why it was refused."""

    refused: str = ""
    job: int = 0
    jobs: tuple[JobState, ...] = ()
    limits: dict[str, int | None] = {}


def queue_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the queue of this user on this host keeps its files."""
    base = environment.get("SHOAL_STATE_DIR")
    if not base:
        state = environment.get("XDG_STATE_HOME")
        base = str((Path(state) if state else Path.home() / ".local" / "state") / "shoal")
    return Path(base).absolute() / "queue" / socket.gethostname()


def make_queue_directory() -> Path:
    path = queue_directory()
    way_out = "Remove it, or set SHOAL_STATE_DIR to a directory of your own."
    try:
        make_private_directory(path, way_out)
    except OSError as error:
        raise UsageError(
            f"The queue cannot keep its files in {path}: {error.strerror}. {way_out}"
        ) from error
    return path


def ask_agent(directory: Path, request: QueueRequest) -> QueueReply:
    """Ask the agent, and start one if there is none."""
    for _ in range(5):
        connection = connect(directory)
        if connection is None:
            start_agent(directory)
            continue
        with connection:
            reply = _exchange(connection, request)
        if reply is not None:
            if reply.refused:
                raise UsageError(reply.refused)
            return reply
        time.sleep(0.2)  # it was about to end
    raise UsageError(f"The agent of the queue ends before it answers. {directory / LOG} says why.")


def _exchange(connection: socket.socket, request: QueueRequest) -> QueueReply | None:
    """The reply; None if the agent ended before it."""
    content = b""
    try:
        connection.settimeout(ANSWER_S)
        connection.sendall(encode_json(request) + b"\n")
        with connection.makefile("rb") as replies:
            content = replies.readline(MOST_BYTES)
    except TimeoutError:
        raise UsageError(
            f"The agent of the queue did not answer within {ANSWER_S:.0f} s. Ask again."
        ) from None
    except OSError:
        return None
    if not content.endswith(b"\n"):
        return None
    return decode_json(content, QueueReply, "The answer of the queue's agent")


def connect(directory: Path) -> socket.socket | None:
    """A connection to the agent; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError):
        connection.connect(reachable(str(directory / SOCKET)))
        if is_own(connection):
            return connection
    connection.close()
    return None


def start_agent(directory: Path) -> None:
    """Start the agent, and wait until one answers; it may be that of another command."""
    with open(directory / LOG, "ab") as log:
        os.fchmod(log.fileno(), 0o600)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "shoal.cluster.local_queue.agent", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    deadline = time.monotonic() + START_S
    while True:
        connection = connect(directory)
        if connection is not None:
            connection.close()
            return
        code = child.poll()
        if code or time.monotonic() > deadline:
            said = (directory / LOG).read_text("utf-8", "replace")[-2000:].strip()
            raise UsageError(f"The agent of the queue does not start:\n{said}")
        time.sleep(0.02)


def lock_queue(directory: Path) -> int | None:
    """The lock that the one agent holds; None if another one has it."""
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
