"""Bytes that somebody else wrote, made into records: whatever is wrong with them is one error.

Files and messages come from disks that fail, from other versions and from people who mean harm,
and a parser has many ways to say that it cannot go on: nested too deep, no UTF-8, a number too
large, a length that nothing has. Every reader decodes in here, so that all of these are one
sentence with the name of what was read, and none is a traceback.

Not for code that works on what was decoded: an error there is a defect, and should look like one.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from shoal.errors import ShoalError, UsageError, sendable

T = TypeVar("T")

# What parsers raise, ours and others': JSON, UTF-8, MessagePack, zip archives, packed numbers.
UNREADABLE: tuple[type[Exception], ...] = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    EOFError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
MOST_SHOWN = 300  # characters of what was read, or of a parser's words, which may quote it


@contextmanager
def decoding(what: str, error: type[ShoalError] = UsageError, way_out: str = "") -> Iterator[None]:
    """Around a parser: if it fails, `error` says that `what` cannot be read, why, what to do."""
    try:
        yield
    except ShoalError:
        raise
    except UNREADABLE as bad:
        raise error(f"{what} cannot be read: {reason(bad)}. {way_out}".rstrip()) from None


def decode_json(
    content: bytes | str,
    kind: type[T],
    what: str,
    error: type[ShoalError] = UsageError,
    way_out: str = "",
) -> T:
    """JSON as a record of a type; an `error` that names `what` if it is none."""
    with decoding(what, error, way_out):
        return msgspec.json.decode(content, type=kind)


def json_or_none(content: bytes, kind: type[T]) -> T | None:
    """The same where what cannot be read does not count: a line that a death cut off, a cache."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE:
        return None


def in_utf8(value: Any) -> bytes:
    """A value as JSON, although a text in it, the name of a file mostly, may not be UTF-8."""
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
    """Why something could not be read, in words and without a full stop."""
    if isinstance(bad, RecursionError):
        return "it is nested too deep"
    if isinstance(bad, UnicodeDecodeError):
        return f"a text in it is not {bad.encoding.upper()}"
    if isinstance(bad, MemoryError):
        return "it asks for more memory than there is"
    return shortened(" ".join(str(bad).split()) or type(bad).__name__).rstrip(".")


def shortened(text: str) -> str:
    """A text from a file as a sentence can hold it."""
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]} ..."
