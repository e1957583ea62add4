"""Small messages between processes of one host, without a thread on either side.

ZeroMQ hands each message to a thread of its own, and that to the other side's: three wake-ups on
the way, each of which costs more than a small message. A `LocalConnection` needs one: the kernel
keeps messages whole and in order (AF_UNIX, SOCK_SEQPACKET), and reports at once that a peer is
gone. The socket lies in the run's directory of sockets, which no other user can enter (`unix.py`).

Not for large messages: `send` does not wait for room but returns False, and the caller sends the
message through ZeroMQ (`wire.py`). Linux only. Read next: `sync/server/loop.py`.
"""

import os
import socket
from contextlib import suppress

from shoal.comm.unix import is_own, new_path, reachable

MOST_BYTES = 1 << 16


class LocalConnection:
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


class LocalListener:
    """Accepts connections of processes of the same user and host."""

    def __init__(self, directory: str) -> None:
        """In a directory of sockets; OSError if it cannot hold one."""
        self.name = new_path(directory)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(reachable(self.name))
            os.chmod(self.name, 0o600)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> LocalConnection | None:
        """The next connection; None if there is none, or if it is another user's process."""
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return None
        if not is_own(connection):
            connection.close()
            return None
        return LocalConnection(connection)

    def close(self) -> None:
        self._socket.close()
        with suppress(OSError):
            os.unlink(self.name)


def connect_local(name: str) -> LocalConnection | None:
    """Connect to a `LocalListener` of this host; None if it is not there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):
        connection.connect(reachable(name))
        if is_own(connection):
            return LocalConnection(connection)
    connection.close()
    return None
