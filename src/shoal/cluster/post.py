"""Letters between the first host of a run and the others: each is read once, and in order.

ZeroMQ mends a connection that broke, but what was on its way is lost. So letters are numbered, each
tells the other side how many of its letters were read here, and letters that it does not confirm
are sent again after a while. `Post` is one side's part and pure: whoever carries letters gives the
time.
"""

from collections import deque
from typing import Any

import msgspec

from shoal.system.fork_server import Born, Exited, Kill, Spawn

BEAT_S = 0.2  # between signs of life
AGAIN_S = 1.0  # after which a letter that was not read is sent again
MOST_BYTES = 4 << 20  # of a letter


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """I want to join. `facts` is what I found of the run, `log` a file that I just wrote in its
    directory."""

    name: str
    address: str
    facts: dict[str, Any]
    log: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """I have no members any more, and will have none."""

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
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
TO_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)


class Letter(msgspec.Struct, frozen=True, array_like=True):
    number: int  # from 1 on; 0 is a sign of life, and has no content
    num_read: int  # of the other side's
    content: bytes = b""


LETTER: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)


class Post:
    """One side's letters, and what it knows of the other side."""

    def __init__(self, now: float):
        self._unread: deque[tuple[int, bytes]] = deque()  # of ours, as far as is known
        self._num_written = self._num_read = 0
        self._heard_at = self._sent_at = now
        self._waits_since = now  # for the first of `_unread` to be read

    def write(self, content: bytes, now: float) -> Letter:
        """A letter to send now."""
        self._num_written += 1
        if not self._unread:
            self._waits_since = now
        self._unread.append((self._num_written, content))
        self._sent_at = now
        return Letter(self._num_written, self._num_read, content)

    def due(self, now: float) -> list[Letter]:
        """What is to be sent by now: letters that were not read in time, or a sign of life."""
        if self._unread and now - self._waits_since > AGAIN_S:
            self._waits_since = self._sent_at = now
            return [Letter(number, self._num_read, content) for number, content in self._unread]
        if now - self._sent_at > BEAT_S:
            self._sent_at = now
            return [self.sign_of_life()]
        return []

    def sign_of_life(self) -> Letter:
        """It tells the other side how many of its letters were read."""
        return Letter(0, self._num_read)

    def read(self, letter: Letter, now: float) -> bytes | None:
        """What a letter holds, if it is the other side's next one; else it came before its turn, or
        twice."""
        self._heard_at = now
        while self._unread and self._unread[0][0] <= letter.num_read:
            self._unread.popleft()
            self._waits_since = now
        if letter.number != self._num_read + 1:
            return None
        self._num_read += 1
        return letter.content

    def silent_s(self, now: float) -> float:
        """For how long nothing came from the other side."""
        return now - self._heard_at

    @property
    def is_read(self) -> bool:
        """Whether the other side has read all that was written."""
        return not self._unread
