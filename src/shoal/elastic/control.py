"""The control socket of a running run, in its run directory, which only its owner can use.

A client sends one line of JSON and receives one when its request is done or refused. No call here
blocks the supervisor. Imports nothing heavy, since commands import it. Read next:
`resize_requests.py`.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError, sendable
from shoal.storage.decoding import decode_json, encode_json, try_decode_json

SOCKET_NAME = "control"
MOST_BYTES = 65_536
MOST_CLIENTS = 32


class ControlRequest(msgspec.Struct, frozen=True):
    """What a command requests."""

    resize: str = ""
    save: bool = False


class SizeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished resize; the fields of the event `resized`."""

    step: int
    plan: str
    change: str
    bytes: int
    ms: float
    lost: str


class ControlReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was done, or why the request was refused."""

    done: SizeChange | None = None
    saved: str = ""  # the name of a checkpoint
    refused: str = ""


class ControlClient:
    """A command that waits for a reply; it may have ended."""

    def __init__(self, connection: socket.socket):
        self.connection, self.received = connection, b""

    def reply(self, reply: ControlReply) -> None:
        with suppress(OSError):  # the command has ended
            self.connection.send(msgspec.json.encode(reply) + b"\n")
        self.connection.close()

    def refuse(self, why: str) -> None:
        self.reply(ControlReply(refused=sendable(why)))


class ControlSocket:
    """The run's end of the socket. The run has locked its directory, so a socket in it is stale."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short_path(run_dir) as path:
            self._socket.bind(path)
            os.chmod(path, 0o600)  # whatever the umask is, and before it listens
        self._socket.listen(MOST_CLIENTS)
        self._socket.setblocking(False)
        self._clients: list[ControlClient] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def requests(self) -> Iterator[tuple[ControlClient, ControlRequest]]:
        """New requests and their clients; malformed requests are refused."""
        with suppress(OSError):
            while len(self._clients) < MOST_CLIENTS:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._clients.append(ControlClient(connection))
        for client in list(self._clients):
            try:
                content = client.connection.recv(MOST_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                content = b""
            client.received += content
            if content and b"\n" not in client.received and len(client.received) < MOST_BYTES:
                continue
            self._clients.remove(client)
            request = try_decode_json(client.received, ControlRequest)
            if request is None:
                client.refuse("This is no request. Use the same version of Shoal.")
                continue
            yield client, request

    def close(self) -> None:
        for client in self._clients:
            client.refuse("The run is over.")
        self._socket.close()
        with suppress(OSError):  # of a disk that cannot be written any more
            self._path.unlink(missing_ok=True)


def send_request(run_dir: Path, **what: str | bool) -> dict[str, Any]:
    """Send a request to the running run of a directory, and wait for its reply: the fields of
    `SizeChange`, or `saved`, or `refused`."""
    if not (run_dir / "run.json").exists():
        raise UsageError(f"{run_dir} holds no run. Give the directory of one, as in runs/name-1.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            with _short_path(run_dir) as path:
                connection.connect(path)
        except OSError as error:
            raise UsageError(
                f"The run in {run_dir} cannot be reached ({error.strerror}): it is over, or was "
                "started by another user. Only a running `shoal train` can be."
            ) from error
        content = b""
        with suppress(ConnectionError), connection.makefile("rb") as replies:  # means no reply
            connection.sendall(encode_json(what) + b"\n")
            content = replies.readline(MOST_BYTES)
    if not content:
        raise UsageError(f"The run in {run_dir} ended before it answered.")
    same = "Use the same version of Shoal."
    reply = decode_json(content, ControlReply, f"The answer of the run in {run_dir}", way_out=same)
    if reply.saved:
        return {"saved": reply.saved}
    if reply.done is None:
        return {"refused": reply.refused or "The run refused it, and gave no reason."}
    return msgspec.structs.asdict(reply.done)


@contextmanager
def _short_path(run_dir: Path) -> Iterator[str]:
    """The socket's path, short enough for the system however deep the directory is."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)
