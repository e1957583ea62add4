"""Layers on servers: Redis and memcached, shared by hosts, that may go away and come back.

A server that does not answer costs a warning once and a bounded wait: its timeout, and one more try
when the connection was an old one. Then it is left alone, for a second at first and up to a minute
while it keeps failing, and the other layers serve. When it answers again it is used again. A
server that answers but will not keep a value (full, or the value too large) is still read.

The server decides how much it keeps and what it evicts. Cost: a round trip a sample.
Values are sealed like all others (`layers.py`). Next: `redis.py`, `memcached.py`.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from shoal.data.cache import forks
from shoal.data.cache.layers import Clock, Content, sealed, unsealed
from shoal.logs import warn_once

TIMEOUT_S = 1.0
EXPIRE_S = 14 * 24 * 3600  # a sample that was not put for so long may go
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0

Answer = TypeVar("Answer")


class ValueRejected(Exception):
    """The server answered, and will not keep the value."""


class ServerUnavailable(Exception):
    """The server did not answer, or not sensibly."""


class Connection(Protocol):
    """A connection to a server; one thread calls it at a time. Raises
    ServerUnavailable or ValueRejected."""

    def read(self, name: str, /) -> bytes | None: ...

    def write(self, name: str, value: bytes, /) -> None: ...

    def close(self) -> None: ...


class ServerLayer:
    """A server, named for people, and how to connect to it; a layer."""

    def __init__(self, name: str, connect: Callable[[], Connection], clock: Clock = time.monotonic):
        self._name = name
        self._connect = connect
        self._clock = clock
        self._connection: Connection | None = None
        self._guard = threading.Lock()
        self._pause_s = 0.0
        self._away_until = 0.0
        forks.watch(self)

    def get(self, key: bytes) -> bytearray | None:
        try:
            value = self._ask(lambda connection: connection.read(_name_of(key)))
        except ValueRejected as refusal:
            self._tell("reading", f"did not give a sample: {refusal}; such samples are made again")
            return None
        if value is None:
            return None
        content = unsealed(key, value)
        if content is None:
            self._tell(
                "damage", "gave a value that is not what was put; such samples are made again"
            )
        return content

    def put(self, key: bytes, *parts: Content) -> bool:
        value = sealed(key, *parts)

        def write(connection: Connection) -> bool:
            connection.write(_name_of(key), value)
            return True

        try:
            return bool(self._ask(write))
        except ValueRejected as refusal:
            self._tell("refusal", f"did not keep a sample: {refusal}. It is still asked for others")
            return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def after_fork(self) -> None:
        """In the child: a connection serves one process."""
        self._connection, self._guard = None, threading.Lock()

    def _ask(self, question: Callable[[Connection], Answer]) -> Answer | None:
        """The answer, or None while the server is away."""
        with self._guard:
            if self._clock() < self._away_until:
                return None
            is_old = self._connection is not None
            try:
                try:
                    answer = question(self._connected())
                except ServerUnavailable:
                    self.close()
                    if not is_old:
                        raise
                    answer = question(self._connected())
            except ServerUnavailable as reason:
                self.close()
                self._leave_alone(reason)
                return None
            self._pause_s = 0.0
            return answer

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _leave_alone(self, reason: ServerUnavailable) -> None:
        self._pause_s = min(max(_LEAST_PAUSE_S, 2 * self._pause_s), _MOST_PAUSE_S)
        self._away_until = self._clock() + self._pause_s
        self._tell("absence", f"does not answer: {reason}. It is not used until it does")

    def _tell(self, kind: str, what: str) -> None:
        """Of each kind of trouble once."""
        about = f"{kind} of the cache {self._name}"
        warn_once(f"The cache {self._name} {what}.", about, on_screen=True)


def _name_of(key: bytes) -> str:
    return f"shoal:{key.hex()}"
