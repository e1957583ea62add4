"""Letters between the first host of a run and the others: each is read once, and in order.

ZeroMQ mends a connection that broke, but what was under way is gone. So letters are numbered, each
says how many of the other side's were read, and what nobody says to have read is sent again after a
while. `Post` is one side's part of it and pure: whoever carries letters gives the time.
"""

from collections import deque
from typing import Any

import msgspec

from shoal.cluster.nursery import Born, Exited, Kill, Spawn

BEAT_S = 0.2
AGAIN_S = 1.0
MOST_BYTES = 4 << 20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """I would join. `facts` is what I found of the run, `log` a file that I wrote in its directory
    just now."""

    name: str
    address: str
    facts: dict[str, Any]
    log: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """I have no members any more, nor will have."""

    how: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """You are this host of the run. If I am silent for longer, end your members and leave."""

    host: int
    seats: str  # that it will have, for people
    timeout_s: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    why: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """End your members, and say that they are gone."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """The run is over."""

    exit_code: int
    how: str


FromHost = Hello | Gone | Born | Exited
ToHost = Welcome | Refused | Spawn | Kill | End | Farewell

encode = msgspec.msgpack.Encoder().encode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode


class Letter(msgspec.Struct, frozen=True, array_like=True):
    number: int  # from 1 on; 0 is a sign of life, and has no content
    num_read: int  # of the other side's
    content: bytes = b""


decode_letter = msgspec.msgpack.Decoder(Letter).decode


class Post:
    """One side's letters. `silent_s` is how long the other side was not heard."""

    def __init__(self, now: float):
        self._unread: deque[tuple[int, bytes]] = deque()  # of ours, as far as is known
        self._num_written = self._num_read = 0
        self._heard_at = self._sent_at = self._begun_at = now

    def write(self, content: bytes, now: float) -> Letter:
        """A letter to send now."""
        self._num_written += 1
        if not self._unread:
            self._begun_at = now
        self._unread.append((self._num_written, content))
        self._sent_at = now
        return Letter(self._num_written, self._num_read, content)

    def due(self, now: float) -> list[Letter]:
        """What is to be sent by now: letters that were not read in time, or a sign of life."""
        if self._unread and now - self._begun_at > AGAIN_S:
            self._begun_at = self._sent_at = now
            return [Letter(number, self._num_read, content) for number, content in self._unread]
        if now - self._sent_at > BEAT_S:
            self._sent_at = now
            return [self.sign()]
        return []

    def sign(self) -> Letter:
        """A sign of life, which says what was read."""
        return Letter(0, self._num_read)

    def read(self, letter: Letter, now: float) -> bytes | None:
        """What came, if it is the next of the other side's."""
        self._heard_at = now
        while self._unread and self._unread[0][0] <= letter.num_read:
            self._unread.popleft()
            self._begun_at = now
        if letter.number != self._num_read + 1:
            return None
        self._num_read += 1
        return letter.content

    def silent_s(self, now: float) -> float:
        return now - self._heard_at

    @property
    def is_read(self) -> bool:
        """Whether the other side has read all that was written."""
        return not self._unread
