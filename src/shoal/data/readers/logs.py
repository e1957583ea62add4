"""Logs of a broker: entries with offsets, which come without an end and are kept for a time.

    shoal.data.redis_log("redis://host:6379/0", "clicks", shuffle=1000)      a stream of Redis
    shoal.data.kafka_log("broker:9092", "clicks", partition=3)               of Kafka (`kafka.py`)
    shoal.data.consume(MyLog(...))                                           any other broker

A `Log` says where it begins and gives the entries behind an offset; that is all that a broker must
be able to do. What comes of it is a stream (`streams.py`): every rank reads the same entries in
the order of their offsets, and the offset of the step that comes next is kept in every checkpoint
beside the marks of its samples. So a resumed run goes on behind the last entry that it was trained
on: none is repeated and none is left out. (It begins to read at the step, or the window of the
shuffle, before that, to compare; the broker must hold these still.) Entries that the broker dropped
before they were read are counted, and end the run: to go on without them would give ranks different
samples.

Cost: entries are read 500 at a time by every rank. A log that gives nothing for `idle_s` ends the
run. Not for logs whose entries can be removed one by one, or changed.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from shoal.data.readers.records import SourceLost, hash_parts
from shoal.data.readers.redis import RedisServer
from shoal.data.streams import Bookmark, StreamSource, refuse_below
from shoal.errors import UsageError
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy

_MANY = 500
_LOOK_S = (0.02, 1.0)  # the first pause while there is nothing new, and the longest


class LogPlace(NamedTuple):
    """Behind an entry: its offset, and how many entries the log ever had up to there."""

    after: str
    seen: int


class Log(Protocol):
    """A broker's log. Each process makes its connections when it first reads."""

    def __str__(self) -> str: ...

    def begin(self) -> LogPlace:
        """Before the oldest entry that it holds."""
        ...

    def read(self, place: LogPlace, most: int) -> Sequence[tuple[str, Any]]:
        """Offsets and entries behind `place`, in order; none if none came yet. `LogGap` if some
        that came behind it are gone."""
        ...


class LogGap(SourceLost):
    """A broker dropped entries before they were read."""


class LogReader:
    """Iterates over a log, and says where it is; every process makes its own."""

    def __init__(self, log: Log, idle_s: float):
        self._log, self._idle_s = log, idle_s
        self._place: LogPlace | None = None

    def state_dict(self) -> dict[str, Any]:
        place = self._place = self._place or self._log.begin()
        return place._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = LogPlace(str(state["after"]), int(state["seen"]))

    def __iter__(self) -> Iterator[Any]:
        while True:
            for offset, entry in self._next_entries():
                assert self._place is not None
                self._place = LogPlace(offset, self._place.seen + 1)
                yield entry

    def _next_entries(self) -> Sequence[tuple[str, Any]]:
        self._place = self._place or self._log.begin()
        pause_s, deadline = _LOOK_S[0], time.monotonic() + self._idle_s
        while not (found := self._log.read(self._place, _MANY)):
            if time.monotonic() > deadline:
                raise SourceLost(
                    f"{self._log} gave nothing behind {self._place.after} for {self._idle_s:g} s. "
                    "If that is meant, raise idle_s; a run that was saved goes on with --resume."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S[1])
        return found


class RedisLog:
    """A stream of Redis as a log; its counters need Redis 7 or newer."""

    def __init__(self, url: str, name: str, timeout_s: float, patience: RetryPolicy):
        self._server, self._name = RedisServer(url, timeout_s, patience), name
        self._server.require(name, "stream")
        if "entries-added" not in self._server.ask(lambda client: client.xinfo_stream(name), name):
            raise UsageError(
                f"{self} is of a Redis older than 7, which does not count what it dropped. Read "
                "what it holds now with redis_stream."
            )

    def __str__(self) -> str:
        return f"the Redis stream {self._name!r}"

    def begin(self) -> LogPlace:
        info = self._server.ask(lambda client: client.xinfo_stream(self._name), self._name)
        return LogPlace("0-0", int(info["entries-added"]) - int(info["length"]))

    def read(self, place: LogPlace, most: int) -> Sequence[tuple[str, Any]]:
        def question(client: Any) -> tuple[list[Any], dict[str, Any]]:
            with client.pipeline(transaction=True) as pipeline:  # of one moment
                pipeline.xrange(self._name, f"({place.after}", count=most)
                pipeline.xinfo_stream(self._name)
                entries, info = pipeline.execute()
            return entries, info

        entries, info = self._server.ask(question, self._name)
        num_dropped = int(info["entries-added"]) - int(info["length"])
        if int(info["entries-added"]) < place.seen:
            raise SourceLost(
                f"{self} had {place.seen} entries and ever got {info['entries-added']} by now: it "
                "was replaced while it was read. Begin a run with these weights (--from)."
            )
        if num_dropped > place.seen:
            raise LogGap(
                f"{self} dropped {num_dropped - place.seen} entries behind {place.after} before "
                "they were read. Let it keep more (MAXLEN, MINID); to go on with what it still "
                "holds, begin a run with these weights (--from)."
            )
        return [
            (
                offset.decode(),
                {field.decode("utf-8", "replace"): value for field, value in fields.items()},
            )
            for offset, fields in entries
        ]


class LogSource(StreamSource):
    """A log as a stream; made by `consume`. It is known by its name, for its first entries go."""

    is_lasting = False

    def __init__(self, log: Log, shuffle: int, idle_s: float):
        super().__init__(lambda: LogReader(log, idle_s), shuffle, None)
        self.log = log

    def content_name(self) -> str:
        return hash_parts(str(self.log))

    def _begin_at(self, place: Bookmark) -> bool:
        """Not from the beginning, as other streams: it may be another one by now."""
        if super()._begin_at(place):
            return True
        raise SourceLost(
            f"{self.log} gives other entries behind {place.state['after']} than the run read "
            "there: it was changed, or is another one of that name. Begin a run with these weights "
            "(--from)."
        )


def consume(log: Log, *, shuffle: int = 0, idle_s: float = 600.0) -> LogSource:
    """A stream of the entries of a log, from the oldest that it holds when a run begins."""
    refuse_below(0, shuffle, "consume(shuffle=...)")
    return LogSource(log, shuffle, idle_s)


def redis_log(
    url: str,
    name: str,
    *,
    shuffle: int = 0,
    idle_s: float = 600.0,
    timeout_s: float = 10.0,
    patience: RetryPolicy = RETRY_POLICY,
) -> LogSource:
    """A stream of the entries of a Redis stream that grows, as dicts of bytes, without an end."""
    return consume(RedisLog(url, name, timeout_s, patience), shuffle=shuffle, idle_s=idle_s)
