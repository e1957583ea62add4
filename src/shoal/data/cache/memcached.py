"""Samples on a memcached server: `host:port`. One keeps values of up to 1 MB, unless it is started
with a larger item size (`memcached -I 16m`)."""

from typing import Any

from shoal.data.cache.remote import (
    EXPIRE_S,
    TIMEOUT_S,
    Connection,
    ServerLayer,
    ServerUnavailable,
    ValueRejected,
)
from shoal.errors import UsageError, require


class _Memcached:
    """A connection; maps the library's errors to ours."""

    def __init__(self, host: str, port: int):
        self._errors = require("pymemcache.exceptions", "memcached")
        self._client: Any = require("pymemcache.client.base", "memcached").Client(
            (host, port), connect_timeout=TIMEOUT_S, timeout=TIMEOUT_S, no_delay=True
        )

    def read(self, name: str) -> bytes | None:
        try:
            found: bytes | None = self._client.get(name)
        except (self._errors.MemcacheError, OSError) as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}") from error
        return found

    def write(self, name: str, value: bytes) -> None:
        try:
            is_kept = self._client.set(name, value, expire=EXPIRE_S, noreply=False)
        except self._errors.MemcacheServerError as error:
            # After "too large" the server still reads the value that follows: a new connection.
            self._client.close()
            raise ValueRejected(str(error)) from error
        except (self._errors.MemcacheError, OSError) as error:
            raise ServerUnavailable(f"{type(error).__name__}: {error}") from error
        if not is_kept:
            raise ValueRejected("it gave no reason")

    def close(self) -> None:
        self._client.close()


def memcached_layer(address: str) -> ServerLayer:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"cached(memcached={address!r}) is not an address. Write host:port, such as "
            "'127.0.0.1:11211'."
        )
    require("pymemcache.client.base", "memcached")

    def connect() -> Connection:
        return _Memcached(host, int(port))

    return ServerLayer(f"on memcached at {address}", connect)
