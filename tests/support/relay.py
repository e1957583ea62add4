"""A relay between ZeroMQ sockets of a host that loses, doubles, delays and damages whole messages.

    with Relay(address) as relay:
        relay.tamper = lambda message: []          # whatever comes from now on is lost
        relay.tamper = lambda message: [message] * 2
        relay.reset()                              # every connection breaks, as a network does it

It understands as much of ZeroMQ's framing as is needed to see where a message ends; what the
sockets say to each other to get acquainted passes untouched. `gates.py` is the like for protocols
of one request a connection.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

from shoal.comm.unix import new_path, reachable

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4  # bits of a frame's first byte
_LENGTH = struct.Struct(">Q")


class Message(NamedTuple):
    """All frames of a message as they are on the wire; its last byte is the last frame's last."""

    content: bytes
    to_server: bool

    def flipped(self) -> "Message":
        """With a bit of the last frame turned over."""
        return self._replace(content=self.content[:-1] + bytes([self.content[-1] ^ 1]))


class Relay:
    """Passes connections on to `target`; `tamper` says what becomes of each message.

    It is called in the threads of connections, one at a time, and may sleep.
    """

    def __init__(self, target: str):
        self._target = target.removeprefix("ipc://")
        self.tamper: Callable[[Message], Sequence[Message]] = lambda message: [message]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        path = new_path(os.path.dirname(self._target))  # beside it
        self._listener.bind(reachable(path))
        self._listener.listen(1024)
        self.address = f"ipc://{path}"
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self) -> None:
        """Break all connections. Sockets connect anew by themselves."""
        for connection in list(self._open):
            _reset(connection)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.reset()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(reachable(self._target))
                except OSError:
                    _reset(client)
                    server.close()
                    continue
                self._open |= {client, server}
                self._start(self._pass_on, client, server, True)
                self._start(self._pass_on, server, client, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        with suppress(OSError, EOFError):
            left = _GREETING_BYTES  # of which each side waits for some of the other's
            while left:
                part = source.recv(left)
                if not part:
                    raise EOFError
                target.sendall(part)
                left -= len(part)
            while True:
                content, is_message = _read_message(source)
                sent = [Message(content, to_server)]
                if is_message:
                    with self._lock:
                        sent = list(self.tamper(sent[0]))
                for message in sent:
                    target.sendall(message.content)
        for connection in (source, target):
            _reset(connection)
            self._open.discard(connection)


def _read(source: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = source.recv(min(num_bytes, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _read_message(source: socket.socket) -> tuple[bytes, bool]:
    """All frames of the next message, and whether it is one of a user of the sockets."""
    frames = []
    while True:
        flags = _read(source, 1)
        length = _read(source, _LENGTH.size if flags[0] & _LONG else 1)
        frames.append(flags + length + _read(source, int.from_bytes(length)))
        if not flags[0] & _MORE:
            return b"".join(frames), not flags[0] & _COMMAND


def _reset(connection: socket.socket) -> None:
    """So that the other side sees it at once."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
