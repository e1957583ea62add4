"""Samples in tar files, as WebDataset writes them, read in place.

Members of one stem make a sample: `a/0001.jpg` and `a/0001.cls` are {"__key__": "a/0001",
"jpg": ..., "cls": ...}, each the bytes of a member. The headers are read once, in one pass; after
that a member is one read away, in any order. Nothing is ever extracted, and a file that holds
anything but plain members and folders is refused: links, devices, sparse files, absolute paths,
"..", sizes beyond a limit, anything behind its end.

The format is a chain of 512-byte headers, each followed by its member's bytes. Long names and sizes
come in a header before the one they are for (pax and GNU). What a header says is not believed: its
checksum must fit, its member must lie inside the file, and everything that is not a plain file or a
folder is refused by name, because a data set has no use for it and an attack has.

Cost: 32 bytes a member and its key kept. A compressed file cannot be entered in its middle, so
.tar.gz is refused.
"""

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.data.readers.files import Files, PathLike, refuse_compressed
from shoal.data.readers.records import NameTable
from shoal.data.sources import normalize_index
from shoal.errors import UsageError
from shoal.logs import log

KEY = "__key__"
MOST_BYTES = 256 << 20  # of one member
_BLOCK = 512
_WINDOW_BYTES = 128 << 10
_MOST_EXTRA_BYTES = 1 << 20  # of a long name or a pax header
_MOST_EMPTY_BYTES = 16 << 20  # behind the last member
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_KINDS = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class TarMember(NamedTuple):
    """A plain file inside an archive."""

    name: str
    offset: int
    num_bytes: int


class TarSamples:
    """Made by `tar`."""

    def __init__(self, files: Files, most_bytes: int):
        self.files = files
        keys: list[str] = []
        found: list[tuple[int, int, int, int]] = []  # file, offset, size, ending
        firsts = [0]
        endings: dict[str, int] = {}
        for number in range(len(files)):
            for key, parts in self._samples(number, most_bytes):
                keys.append(key)
                for ending, part in parts.items():
                    kind = endings.setdefault(ending, len(endings))
                    found.append((number, part.offset, part.num_bytes, kind))
                firsts.append(len(found))
        self.keys = NameTable(keys)
        self._members = np.array(found, dtype=np.int64).reshape(-1, 4)
        self._firsts = np.array(firsts, dtype=np.int64)
        self._endings = list(endings)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = normalize_index(index, len(self))
        sample: dict[str, Any] = {KEY: self.keys[at]}
        for row in self._members[self._firsts[at] : self._firsts[at + 1]]:
            number, offset, size, ending = (int(value) for value in row)
            sample[self._endings[ending]] = self.files.read(number, offset, offset + size)
        return sample

    def identity(self) -> str:
        return self.files.identity("tar")

    def content_name(self) -> str:
        return self.files.content_name()

    def _samples(self, number: int, most_bytes: int) -> Iterator[tuple[str, dict[str, TarMember]]]:
        """The samples of a file in the order in which their first members come."""
        name = self.files.names[number]
        refuse_compressed(self.files, number, "member")
        samples: dict[str, dict[str, TarMember]] = {}
        num_left_out = 0
        for member in _members(self.files, number, most_bytes):
            key, ending = _stem(member.name)
            if not ending:
                num_left_out += 1
                continue
            parts = samples.setdefault(key, {})
            if ending in parts or ending == KEY:
                raise UsageError(
                    f"{name} holds {member.name} twice. A sample is the members of one stem, each "
                    "with an ending of its own."
                )
            parts[ending] = member
        if num_left_out:
            log.warning("%s: %d members have no ending and are left out", name, num_left_out)
        yield from samples.items()


def tar(
    paths: PathLike | Sequence[PathLike],
    *,
    most_bytes: int = MOST_BYTES,
    options: Mapping[str, Any] | None = None,
) -> TarSamples:
    """A source of the samples in one or several tar files, by path or URL, as dicts of bytes.

    A member of more than `most_bytes` is refused. `options` go to the back end of a URL.
    """
    return TarSamples(Files(paths, options), most_bytes)


def _stem(path: str) -> tuple[str, str]:
    """The key of a member and its ending: what follows the first dot of its name, if any."""
    folder, slash, name = path.rpartition("/")
    stem, _, ending = name.partition(".")
    return f"{folder}{slash}{stem}", ending.lower() if stem else ""


class _BadHeader(Exception):
    """What is wrong with a header."""


def _members(files: Files, number: int, most_bytes: int) -> Iterator[TarMember]:
    """The plain members of a tar file, in order; refuses what does not belong into one."""
    chain = _HeaderWalk(files, number, most_bytes)
    try:
        yield from chain.members()
    except _BadHeader as error:
        raise UsageError(
            f"{files.names[number]}, at byte {chain.at}: {error} Nothing of this file is used."
        ) from None


class _HeaderWalk:
    """A walk from header to header."""

    def __init__(self, files: Files, number: int, most_bytes: int):
        self._files, self._number, self._most_bytes = files, number, most_bytes
        self._end = files.num_bytes(number)
        self._window, self._start = b"", 0
        self.at = 0

    def members(self) -> Iterator[TarMember]:
        extra: dict[str, str] = {}  # what headers before said about the next member
        while (info := self._header()) is not None:
            if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extra |= _pax(self._content(info))
            elif info.type == tarfile.XGLTYPE:
                if {"path", "size", "linkpath"} & _pax(self._content(info)).keys():
                    raise _BadHeader("a global header renames or resizes all members.")
            elif info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                text = self._content(info).rstrip(b"\0").decode("utf-8", "surrogateescape")
                extra |= {"path": text} if info.type == tarfile.GNUTYPE_LONGNAME else {}
            else:
                name, size = self._checked(info, extra)
                if info.type != tarfile.DIRTYPE:
                    yield TarMember(name, self.at + _BLOCK, size)
                self._step(size)
                extra = {}
                continue
            self._step(info.size)
        if extra:
            raise _BadHeader("the file ends after a header that belongs to a member.")

    def _header(self) -> tarfile.TarInfo | None:
        """The header here; None at the end."""
        if self.at + _BLOCK > self._end:
            raise _BadHeader(
                "the file ends without the empty blocks that close a tar file: it was cut."
            )
        block = self._read(self.at, self.at + _BLOCK)
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            self._refuse_rest()
            return None
        except tarfile.HeaderError as error:
            raise _BadHeader(f"no tar header ({error}).") from None

    def _refuse_rest(self) -> None:
        """Behind the end there are some empty blocks alone; else members would be lost unsaid."""
        for start in range(self.at, self._end, _WINDOW_BYTES):
            rest = self._read(start, min(self._end, start + _WINDOW_BYTES))
            if rest.count(0) < len(rest) or start - self.at > _MOST_EMPTY_BYTES:
                raise _BadHeader(
                    "the empty block that closes a tar file stands here, and more follows. It was "
                    "damaged, or several were put together by cat; name each of them by itself."
                )

    def _checked(self, info: tarfile.TarInfo, extra: dict[str, str]) -> tuple[str, int]:
        """Name and size of a member that may stay."""
        name = extra.get("path", info.name)
        if info.type not in (*_PLAIN, tarfile.DIRTYPE):
            kind = _KINDS.get(info.type, f"of the unknown type {info.type!r}")
            raise _BadHeader(f"{name!r} is {kind}, and only plain files are samples.")
        if any(key.startswith("GNU.sparse") for key in extra):
            raise _BadHeader(f"{name!r} is a sparse file, and only plain files are samples.")
        parts = [part for part in name.rstrip("/").split("/") if part != "."]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise _BadHeader(f"{name!r} points out of the archive.")
        size = 0 if info.type == tarfile.DIRTYPE else _size(extra.get("size"), info.size)
        if size > self._most_bytes:
            raise _BadHeader(
                f"{name!r} has {size:,} bytes, and {self._most_bytes:,} are allowed. Raise "
                "most_bytes if it is meant."
            )
        if size < 0 or self.at + _BLOCK + size > self._end:
            raise _BadHeader(
                f"{name!r} has {size:,} bytes and does not fit into the file: it was cut."
            )
        return "/".join(parts), size

    def _content(self, info: tarfile.TarInfo) -> bytes:
        """The bytes of a header that speaks of the next one."""
        if not 0 <= info.size <= _MOST_EXTRA_BYTES:
            raise _BadHeader(f"a header of {info.size:,} bytes; {_MOST_EXTRA_BYTES:,} are allowed.")
        if self.at + _BLOCK + info.size > self._end:
            raise _BadHeader("a header extends beyond the end of the file: it was cut.")
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
            raise _BadHeader("a pax header cannot be read.")
        pairs[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at = stop
    return pairs


def _size(said: str | None, size: int) -> int:
    if said is None:
        return size
    if not said.isascii() or not said.isdigit() or len(said) > 20:
        raise _BadHeader(f"the size {said[:40]!r} is no number.")
    return int(said)
