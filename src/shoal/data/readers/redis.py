"""Samples in Redis: the entries of a list as bytes, or those of a stream as dicts of bytes.

An entry of a list is known by its index, so a list must not change during a run: its length is
asked for with every read, in one transaction, and another one is `SourceLost`. An entry of a stream
is known by its id, which stays; what is added later is not seen, and an entry that was removed is a
`BadRecord`.

Cost: one round trip for `many(ids)`. Redis finds an entry in the middle of a list by walking there,
so streams suit large sets better; a stream is read through once when the source is made, to learn
its ids (16 bytes each are kept). Needs the extra `redis`. Not for clusters.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from shoal.data.readers.records import BadRecord, Indices, SourceLost, normalize_indices
from shoal.data.readers.retries import RetriedConnection
from shoal.data.sources import Ids
from shoal.data.validate import text_of
from shoal.errors import UsageError, require
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy, redact_url

Answer = TypeVar("Answer")
_MANY = 1000  # entries of a stream that are read at a time


class RedisServer:
    """A Redis at a URL, through connections that each process makes for itself."""

    def __init__(self, url: str, timeout_s: float, patience: RetryPolicy):
        self._place = redact_url(text_of(url, "a reader of Redis"))
        kinds = require("redis", "redis").exceptions
        refusals = kinds.AuthenticationError | kinds.AuthorizationError
        passing = kinds.ConnectionError | kinds.TimeoutError | OSError
        self._server = RetriedConnection(
            lambda: client(url, timeout_s),
            lambda opened: opened.close(),
            lambda error: not isinstance(error, refusals) and isinstance(error, passing),
            patience,
            "Check the user and the password in the URL, and what lies under this key.",
        )

    def ask(self, question: Callable[[Any], Answer], name: str) -> Answer:
        return self._server.ask(question, f"Redis at {self._place} cannot be asked for {name!r}")

    def require(self, name: str, kind: str) -> None:
        """Refuse a key that is not there, or of another type than wanted."""
        what = f"Redis at {self._place} cannot be asked for {name!r}"
        found = self._server.ask_first(lambda client: client.type(name), what).decode()
        if found == "none":
            raise UsageError(f"Redis at {self._place} has no key {name!r}.")
        if found != kind:
            raise UsageError(
                f"{name!r} in Redis is a {found}, not a {kind}. Lists are read by redis_list, "
                "streams by redis_stream."
            )


def client(url: str, timeout_s: float) -> Any:
    """A connection that waits for a bounded time and repeats nothing: its caller does."""
    retry = require("redis.retry", "redis").Retry
    none = require("redis.backoff", "redis").NoBackoff
    try:
        _refuse_slashes(url)
        return require("redis", "redis").Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,  # which old servers speak too
            retry=retry(none(), 0),
        )
    except ValueError:  # whose words may hold a part of the password
        raise UsageError(
            "what was given is not a URL that Redis knows. Write redis://host:6379/0, with "
            "user:password@ before the host if the server wants them, and in a password %2F for /, "
            "%3F for ? and %23 for #."
        ) from None


def _refuse_slashes(url: str) -> None:
    """Or what stands before the slash in a password would be taken for the host."""
    parts = urlsplit(url)
    if parts.scheme in ("redis", "rediss") and "@" in f"{parts.path}{parts.query}{parts.fragment}":
        raise ValueError


class RedisList:
    """Made by `redis_list`: entry i of a list, as bytes."""

    def __init__(self, server: RedisServer, name: str):
        server.require(name, "list")
        self._server, self._name = server, name
        self._length = int(server.ask(lambda client: client.llen(name), name))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> bytes:
        return self.many([index])[0]

    def many(self, ids: Indices) -> list[bytes]:
        """Many entries in one transaction; neighbours are asked for together."""
        wanted = normalize_indices(ids, len(self))
        runs = _runs(np.unique(wanted))
        length, *found = self._server.ask(lambda client: self._fetch(client, runs), self._name)
        if length != self._length:
            raise SourceLost(
                f"the Redis list {self._name!r} had {self._length} entries and now has {length}. "
                "An index may mean another entry; leave a list alone that a run reads."
            )
        entries: dict[int, bytes] = {}
        for (start, _), values in zip(runs, found, strict=True):
            entries |= {start + at: value for at, value in enumerate(values)}
        return [entries[int(index)] for index in wanted]

    def _fetch(self, client: Any, runs: list[tuple[int, int]]) -> list[Any]:
        with client.pipeline(transaction=True) as pipeline:
            pipeline.llen(self._name)
            for start, last in runs:
                pipeline.lrange(self._name, start, last)
            answers: list[Any] = pipeline.execute()
        return answers


class RedisStream:
    """Made by `redis_stream`: the fields of entry i of a stream, as a dict of bytes."""

    def __init__(self, server: RedisServer, name: str):
        server.require(name, "stream")
        self._server, self._name = server, name
        self._entries = self._read_ids()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        return self.many([index])[0]

    def many(self, ids: Indices) -> list[dict[str, bytes]]:
        """Many entries in one round trip."""
        wanted = normalize_indices(ids, len(self))
        names = [f"{first}-{second}" for first, second in self._entries[wanted]]
        answers = self._server.ask(lambda client: self._fetch(client, names), self._name)
        for index, name, answer in zip(wanted, names, answers, strict=True):
            if not answer:
                raise BadRecord(
                    f"entry {name} of the Redis stream {self._name!r} (sample {index}) is gone. It "
                    "was there when the run began; do not trim a stream that a run reads."
                )
        return [
            {field.decode("utf-8", "replace"): value for field, value in answer[0][1].items()}
            for answer in answers
        ]

    def _fetch(self, client: Any, names: list[str]) -> list[Any]:
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.xrange(self._name, name, name)
            answers: list[Any] = pipeline.execute()
        return answers

    def _read_ids(self) -> NDArray[np.uint64]:
        parts = [np.empty((0, 2), np.uint64)]
        start = "-"
        while True:
            entries = self._page(start)
            if not entries:
                return np.concatenate(parts)
            pairs = [name.decode().split("-") for name, _ in entries]
            parts.append(np.array([[int(a), int(b)] for a, b in pairs], dtype=np.uint64))
            start = f"({entries[-1][0].decode()}"  # behind the last one

    def _page(self, start: str) -> list[Any]:
        found: list[Any] = self._server.ask(
            lambda client: client.xrange(self._name, start, count=_MANY), self._name
        )
        return found


def redis_list(
    url: str, name: str, *, timeout_s: float = 10.0, patience: RetryPolicy = RETRY_POLICY
) -> RedisList:
    """A source of the entries of a Redis list, as bytes. `url` is redis://[:password@]host:port/0.

    An answer is waited for `timeout_s` seconds, as often as `patience` says.
    """
    return RedisList(RedisServer(url, timeout_s, patience), name)


def redis_stream(
    url: str, name: str, *, timeout_s: float = 10.0, patience: RetryPolicy = RETRY_POLICY
) -> RedisStream:
    """A source of the entries of a Redis stream, as dicts of bytes, in the order of their ids.

    An answer is waited for `timeout_s` seconds, as often as `patience` says.
    """
    return RedisStream(RedisServer(url, timeout_s, patience), name)


def _runs(indexes: Ids) -> list[tuple[int, int]]:
    """Sorted indexes as runs of neighbours, first and last."""
    found = []
    for _, group in groupby(enumerate(indexes.tolist()), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        found.append((members[0], members[-1]))
    return found
