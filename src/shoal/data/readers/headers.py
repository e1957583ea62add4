"""The headers of a tar file, read by offset: where each plain member lies.

The format is a chain of 512-byte headers, each followed by its member's bytes. Long names and sizes
come in a header before the one they are for (pax and GNU). What a header says is not believed: its
checksum must fit, its member must lie inside the file, and everything that is not a plain file or a
folder is refused by name, because a data set has no use for it and an attack has.
"""

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from shoal.data.readers.files import Files
from shoal.errors import UsageError

_BLOCK = 512
_WINDOW_BYTES = 128 << 10
_MOST_EXTRA_BYTES = 1 << 20  # of a long name or a pax header
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_KINDS = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class Member(NamedTuple):
    """A plain file inside an archive."""

    name: str
    offset: int
    num_bytes: int


class _Bad(Exception):
    """What is wrong with a header."""


def members(files: Files, number: int, most_bytes: int) -> Iterator[Member]:
    """The plain members of a tar file, in order; refuses what does not belong into one."""
    chain = _Chain(files, number, most_bytes)
    try:
        yield from chain.members()
    except _Bad as error:
        raise UsageError(
            f"{files.names[number]}, at byte {chain.at}: {error} Nothing of this file is used."
        ) from None


class _Chain:
    """A walk from header to header."""

    def __init__(self, files: Files, number: int, most_bytes: int):
        self._files, self._number, self._most_bytes = files, number, most_bytes
        self._end = files.num_bytes(number)
        self._window, self._start = b"", 0
        self.at = 0

    def members(self) -> Iterator[Member]:
        extra: dict[str, str] = {}  # what headers before said about the next member
        while (info := self._header()) is not None:
            if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extra |= _pax(self._content(info))
            elif info.type == tarfile.XGLTYPE:
                if {"path", "size", "linkpath"} & _pax(self._content(info)).keys():
                    raise _Bad("a global header renames or resizes all members.")
            elif info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                text = self._content(info).rstrip(b"\0").decode("utf-8", "surrogateescape")
                extra |= {"path": text} if info.type == tarfile.GNUTYPE_LONGNAME else {}
            else:
                name, size = self._checked(info, extra)
                if info.type != tarfile.DIRTYPE:
                    yield Member(name, self.at + _BLOCK, size)
                self._step(size)
                extra = {}
                continue
            self._step(info.size)
        if extra:
            raise _Bad("the file ends after a header that belongs to a member.")

    def _header(self) -> tarfile.TarInfo | None:
        """The header here; None at the end."""
        if self.at + _BLOCK > self._end:
            raise _Bad("the file ends without the empty blocks that close a tar file: it was cut.")
        block = self._read(self.at, self.at + _BLOCK)
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return None
        except tarfile.HeaderError as error:
            raise _Bad(f"no tar header ({error}).") from None

    def _checked(self, info: tarfile.TarInfo, extra: dict[str, str]) -> tuple[str, int]:
        """Name and size of a member that may stay."""
        name = extra.get("path", info.name)
        if info.type not in (*_PLAIN, tarfile.DIRTYPE):
            kind = _KINDS.get(info.type, f"of the unknown type {info.type!r}")
            raise _Bad(f"{name!r} is {kind}, and only plain files are samples.")
        if any(key.startswith("GNU.sparse") for key in extra):
            raise _Bad(f"{name!r} is a sparse file, and only plain files are samples.")
        parts = [part for part in name.rstrip("/").split("/") if part != "."]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise _Bad(f"{name!r} points out of the archive.")
        size = 0 if info.type == tarfile.DIRTYPE else _size(extra.get("size"), info.size)
        if size > self._most_bytes:
            raise _Bad(
                f"{name!r} has {size:,} bytes, and {self._most_bytes:,} are allowed. Raise "
                "most_bytes if it is meant."
            )
        if size < 0 or self.at + _BLOCK + size > self._end:
            raise _Bad(f"{name!r} has {size:,} bytes and does not fit into the file: it was cut.")
        return "/".join(parts), size

    def _content(self, info: tarfile.TarInfo) -> bytes:
        """The bytes of a header that speaks of the next one."""
        if not 0 <= info.size <= _MOST_EXTRA_BYTES:
            raise _Bad(f"a header of {info.size:,} bytes; {_MOST_EXTRA_BYTES:,} are allowed.")
        if self.at + _BLOCK + info.size > self._end:
            raise _Bad("a header goes on beyond the end of the file: it was cut.")
        return self._read(self.at + _BLOCK, self.at + _BLOCK + info.size)

    def _step(self, size: int) -> None:
        self.at += _BLOCK + -(-size // _BLOCK) * _BLOCK

    def _read(self, start: int, stop: int) -> bytes:
        """Bytes by way of a window, so that small members cost no read each."""
        if start < self._start or stop > self._start + len(self._window):
            end = min(self._end, max(stop, start + _WINDOW_BYTES))
            self._window, self._start = self._files.read(self._number, start, end), start
        return self._window[start - self._start : stop - self._start]


def _pax(content: bytes) -> dict[str, str]:
    """The pairs of a pax header: "length key=value" and a newline each."""
    pairs: dict[str, str] = {}
    at = 0
    while at < len(content):
        digits, space, _ = content[at : at + 20].partition(b" ")
        stop = at + int(digits) if digits.isdigit() and space else 0
        key, equals, value = content[at + len(digits) + 1 : stop - 1].partition(b"=")
        if not at < stop <= len(content) or content[stop - 1 : stop] != b"\n" or not equals:
            raise _Bad("a pax header cannot be read.")
        pairs[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at = stop
    return pairs


def _size(said: str | None, size: int) -> int:
    if said is None:
        return size
    if not said.isascii() or not said.isdigit() or len(said) > 20:
        raise _Bad(f"the size {said[:40]!r} is no number.")
    return int(said)
