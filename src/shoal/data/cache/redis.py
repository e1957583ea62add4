"""Samples on a Redis server: `redis://[user:password@]host:port/number`."""

from typing import Any
from urllib.parse import urlsplit

from shoal.data.cache.remote import (
    EXPIRE_S,
    TIMEOUT_S,
    Connection,
    ServerLayer,
    ServerUnavailable,
    ValueRejected,
)
from shoal.data.readers.redis import client
from shoal.errors import UsageError, require
from shoal.logs import log


class _Redis:
    """A connection; maps the library's errors to ours."""

    def __init__(self, url: str):
        self._errors = require("redis.exceptions", "redis")
        self._client = client(url, TIMEOUT_S)

    def read(self, name: str) -> bytes | None:
        found = self._call("GET", name)
        if found is not None and not isinstance(found, bytes):
            raise ServerUnavailable(f"it gave a {type(found).__name__} for a value")
        return found

    def write(self, name: str, value: bytes) -> None:
        self._call("SET", name, value, "EX", EXPIRE_S)

    def ping(self) -> None:
        self._call("PING")

    def close(self) -> None:
        self._client.close()

    def _call(self, *words: Any) -> Any:
        try:
            return self._client.execute_command(*words)
        except (self._errors.AuthenticationError, self._errors.AuthorizationError) as error:
            raise CredentialsRejected(str(error)) from error
        except (self._errors.ConnectionError, self._errors.TimeoutError, OSError) as error:
            raise ServerUnavailable(_in_words(error)) from error
        except self._errors.ResponseError as error:
            if str(error).startswith(("NOPERM", "NOAUTH", "WRONGPASS")):
                raise CredentialsRejected(str(error)) from error
            raise ValueRejected(str(error)) from error
        except self._errors.RedisError as error:
            raise ServerUnavailable(_in_words(error)) from error


class CredentialsRejected(ServerUnavailable):
    """The server wants other credentials."""


def redis_layer(url: str) -> ServerLayer:
    """The layer; asks the server once, so that wrong credentials are seen before a run starts."""
    place = _place(url)

    def connect() -> Connection:
        return _Redis(url)

    try:
        first = _Redis(url)
    except UsageError as error:
        raise UsageError(f"cached(redis=...): {error}") from None
    try:
        first.ping()
    except CredentialsRejected as error:
        raise UsageError(
            f"Redis at {place} refuses cached(redis=...): {error}. Put the credentials into the "
            "URL: redis://user:password@host:port/0."
        ) from None
    except (ServerUnavailable, ValueRejected) as error:
        log.warning(f"Redis at {place} does not answer yet: {error}. It is asked again later.")
    finally:
        first.close()
    return ServerLayer(f"on Redis at {place}", connect)


def _place(url: str) -> str:
    """Host and port, and no password."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname or parts.path}:{parts.port or 6379}"
    except ValueError:
        return "an address that cannot be read"


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")  # it stands within a sentence
