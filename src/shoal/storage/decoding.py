"""Decode bytes from outside: whatever is wrong with them becomes one error with one sentence.

Files and messages come from failing disks, other versions and attackers, and a parser fails in many
ways: nesting too deep, no UTF-8, a number too large, a wrong length. Every reader decodes through
this module, so that each of these is one sentence with the name of what was read, and no traceback.

Not for code that works on decoded values: an error there is a defect, and should look like one.
"""

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.errors import ShoalError, UsageError, sendable

T = TypeVar("T")

# What parsers raise: JSON, UTF-8, MessagePack, zip archives, packed numbers.
PARSE_ERRORS: tuple[type[Exception], ...] = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError),
    *(MemoryError, EOFError, struct.error, zlib.error, zipfile.BadZipFile),
)
MOST_SHOWN = 300  # characters of untrusted text in a message


@contextmanager
def decoding(what: str, error: type[ShoalError] = UsageError, way_out: str = "") -> Iterator[None]:
    """Around a parser: if it fails, raise `error`, which names `what`, the reason and a way out."""
    try:
        yield
    except ShoalError:
        raise
    except PARSE_ERRORS as bad:
        raise error(f"{what} cannot be read: {reason(bad)}. {way_out}".rstrip()) from None


def decode_json(
    content: bytes | str,
    kind: type[T],
    what: str,
    error: type[ShoalError] = UsageError,
    way_out: str = "",
) -> T:
    """Decode JSON as a `kind`; raises `error`, which names `what`."""
    with decoding(what, error, way_out):
        return msgspec.json.decode(content, type=kind)


def try_decode_json(content: bytes, kind: type[T]) -> T | None:
    """Decode JSON as a `kind`; None if it cannot be read, as a torn line or a stale cache."""
    try:
        return msgspec.json.decode(content, type=kind)
    except PARSE_ERRORS:
        return None


class FormatHeader(msgspec.Struct):
    """What must be understood of a described file before the rest is."""

    format: str = ""
    version: int = 0


class SealedFile(NamedTuple):
    """JSON that says its format and version, beside a file with its SHA-256."""

    name: str
    seal_name: str
    format: str
    version: int
    error: type[ShoalError]

    def seal(self, content: bytes) -> bytes:
        """In the form that `sha256sum -c` reads."""
        return f"{hashlib.sha256(content).hexdigest()}  {self.name}\n".encode()

    def decode(self, content: bytes, sealed: bytes, kind: type[T]) -> T:
        """Decode what matches its seal, as a `kind`."""
        name = self.name
        if sealed != self.seal(content):
            raise self.error(f"{name} is not what {self.seal_name} says: one of them was changed.")
        found = decode_json(content, FormatHeader, name, self.error)
        if found.format != self.format:
            raise self.error(f"{name} is of the format {found.format!r}, not {self.format!r}.")
        if found.version != self.version:
            why = f"{name} is of version {found.version}; this Shoal reads version {self.version}."
            raise self.error(why)
        return decode_json(content, kind, name, self.error)


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON; text that is not UTF-8, such as a file name, is escaped."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_sendable(msgspec.to_builtins(value)))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, dict):
        return {_sendable(key): _sendable(part) for key, part in value.items()}
    return [_sendable(part) for part in value] if isinstance(value, list | tuple) else value


def reason(bad: BaseException) -> str:
    """Why something could not be read, without a full stop."""
    if isinstance(bad, RecursionError):
        return "it is nested too deep"
    if isinstance(bad, UnicodeDecodeError):
        return f"a text in it is not {bad.encoding.upper()}"
    if isinstance(bad, MemoryError):
        return "it asks for more memory than there is"
    return shorten(" ".join(str(bad).split()) or type(bad).__name__).rstrip(".")


def shorten(text: str) -> str:
    """Untrusted text, cut to `MOST_SHOWN` characters."""
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]} ..."
