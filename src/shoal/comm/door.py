"""Small messages between processes of one host, without a thread on either side.

ZeroMQ hands each message to a thread of its own, and that to the other side's: three wake-ups on
the way, each of which costs more than what a small message asks for. Through a door it is one: the
kernel keeps messages whole and in order (AF_UNIX, SOCK_SEQPACKET), and a peer that is gone is seen
at once. It lies in the run's directory of sockets, so that no other user comes near it (`unix.py`).

Not for what is large: nobody waits here until there is room; what finds none goes another way.
Linux only. Read next: `sync/server/serve.py`.
"""

import os
import socket
from contextlib import suppress

from shoal.comm.unix import is_own, new_path, reachable

MOST_BYTES = 1 << 16


class Passage:
    """One side of a connection."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: bytes | memoryview) -> bool:
        """False if it cannot be: too large, or the other side is gone or does not read."""
        try:
            return len(message) <= MOST_BYTES and self._connection.send(message) == len(message)
        except OSError:
            return False

    def receive(self) -> bytes | None:
        """The next message; None if there is none. ConnectionError if the other side is gone."""
        try:
            message = self._connection.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        if not message:
            raise ConnectionResetError("the other side is gone")
        return message

    def close(self) -> None:
        self._connection.close()


class Door:
    """Where processes of the same user and host come in."""

    def __init__(self, directory: str) -> None:
        """In a directory of sockets; OSError if it cannot hold one."""
        self.name = new_path(directory)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.setblocking(False)
        try:
            self._listening.bind(reachable(self.name))
            os.chmod(self.name, 0o600)
            self._listening.listen()
        except OSError:
            self._listening.close()
            raise

    def fileno(self) -> int:
        return self._listening.fileno()

    def open(self) -> Passage | None:
        """Whoever came, unless it is another user's process."""
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return None
        if not is_own(connection):
            connection.close()
            return None
        return Passage(connection)

    def close(self) -> None:
        self._listening.close()
        with suppress(OSError):
            os.unlink(self.name)


def enter(name: str) -> Passage | None:
    """Go through a door of this host; None if it is not there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):
        connection.connect(reachable(name))
        if is_own(connection):
            return Passage(connection)
    connection.close()
    return None
