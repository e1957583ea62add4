"""A packed file: what is stored of a model, byte planes and zstd, without a loss.

The bytes of each number are sorted by significance before zstd sees them: signs and exponents of
weights repeat, their last bits are noise, and apart the first shrink. Which bytes belong to one
number is read from the header of a safetensors file; of other files the best of three widths is
taken, block by block. A pack holds one file, or a directory of files by name.

Layout: a mark, the blocks one after the other, an index in JSON, and a tail with the index's length
and hash. Every file has a hash of what it was before. Cost: memory of a few blocks of 4 MiB, and a
second pass that reads the pack back before it gets its name. Read next: `slim/packing.py`.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from shoal.checkpoint.manifest import ITEM_BYTES
from shoal.checkpoint.verify import LENGTH_BYTES, MOST_HEADER_BYTES
from shoal.errors import BadCheckpoint, UsageError, require
from shoal.formats.new_output import new_directory, new_files
from shoal.storage.decoding import decode_json, try_decode_json

MARK = b"shoalpk1"
BLOCK_BYTES = 4 << 20
LEVEL = 3  # of zstd; higher ones take far longer and gain a percent on weights
_TAIL_BYTES = 8 + 16 + len(MARK)  # length and hash of the index, and the mark again
_MOST_INDEX_BYTES = 256 << 20
_WIDTHS = (1, 2, 4)  # that are tried where the width of numbers is not known
_ALL_WIDTHS = (1, 2, 4, 8)


class _PackedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A part of a file: its bytes in the pack and unpacked, and the width of its numbers."""

    num_stored: int
    num_bytes: int
    width: int


class PackedFile(msgspec.Struct, frozen=True):
    """A file of a pack. Its blocks follow those of the file before it."""

    name: str  # relative, with / between directories
    num_bytes: int
    hash: str  # XXH3-128 of its content
    blocks: tuple[_PackedBlock, ...]


class _PackIndex(msgspec.Struct, frozen=True):
    is_directory: bool
    files: tuple[PackedFile, ...]


class _TensorEntry(msgspec.Struct, frozen=True):
    """What is read of a tensor in the header of a safetensors file."""

    dtype: str
    data_offsets: tuple[int, int]


class _Span(NamedTuple):
    """A range of a file whose numbers have one width; 0 if it is not known."""

    start: int
    stop: int
    width: int


class PackSizes(NamedTuple):
    """Bytes of what was packed, and of the pack."""

    before: int
    after: int


def is_pack(path: Path) -> bool:
    """Whether a path is a packed file, by its first bytes."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK
    except OSError:
        return False


def write_pack(source: Path, out: Path) -> PackSizes:
    """Pack a file or a directory; `out` appears once it was read back and compared."""
    files = _files_below(source) if source.is_dir() else [source]
    if not files:
        raise UsageError(f"{source} holds no files: there is nothing to pack.")
    with new_files(out) as partial:
        with open(partial, "xb") as pack:
            pack.write(MARK)
            packed = [_pack_file(file, _name_of(file, source), pack) for file in files]
            index = msgspec.json.encode(_PackIndex(source.is_dir(), tuple(packed)))
            pack.write(index)
            pack.write(len(index).to_bytes(8, "little"))
            pack.write(xxhash.xxh3_128_digest(index) + MARK)
        written = PackReader(partial)
        if written.files != tuple(packed):
            raise BadCheckpoint(f"{out} does not read back as it was written. Nothing was left.")
        for file in packed:
            for _ in written.content(file):  # which compares its hash with the one of the source
                pass
        return PackSizes(sum(file.num_bytes for file in packed), partial.stat().st_size)


def unpack(path: Path, out: Path) -> PackSizes:
    """Write what a pack holds: a file or a directory that appears whole or not at all."""
    pack = PackReader(path)
    if pack.is_directory:
        with new_directory(out) as folder:
            for file in pack.files:
                (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
                _write(folder / file.name, pack.content(file))
    else:
        with new_files(out) as partial:
            _write(partial, pack.content(pack.files[0]))
    return PackSizes(path.stat().st_size, sum(file.num_bytes for file in pack.files))


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """What a pack holds, on a disk for a while, under the name that it had if it is one file."""
    pack = PackReader(path)
    with tempfile.TemporaryDirectory(prefix="shoal-pack-") as folder:
        place = Path(folder) / ("model" if pack.is_directory else pack.files[0].name)
        unpack(path, place)
        yield place


class PackReader:
    """An opened pack whose index is sound. Its contents are checked as they are read."""

    def __init__(self, path: Path):
        self._path = path
        try:
            with open(path, "rb") as file:
                index, end = self._read_index(file)
        except OSError as error:
            raise BadCheckpoint(f"{path} cannot be read: {error.strerror}.") from None
        self.is_directory, self.files = index.is_directory, index.files
        self._starts: dict[str, int] = {}
        at = len(MARK)
        for one in self.files:
            self._check(one)
            self._starts[one.name] = at
            at += sum(block.num_stored for block in one.blocks)
        if at != end:
            raise self._damaged("its blocks are not as long as its index says")
        if not self.files or len(self._starts) != len(self.files):
            raise self._damaged("its index names no file, or one twice")
        if len(self.files) > 1 and not self.is_directory:
            raise self._damaged("it is to be one file, and holds several")

    def content(self, file: PackedFile) -> Iterator[bytes]:
        """The bytes of a file, block by block; after the last they are known to be right."""
        decompressor = require("zstandard", extra="slim").ZstdDecompressor()
        hashed = xxhash.xxh3_128()
        with open(self._path, "rb") as pack:
            pack.seek(self._starts[file.name])
            for block in file.blocks:
                raw = self._unpack_block(decompressor, pack.read(block.num_stored), block)
                hashed.update(raw)
                yield raw
        if hashed.hexdigest() != file.hash:
            raise self._damaged(f"{file.name} has another hash than when it was packed")

    def _unpack_block(self, decompressor: Any, stored: bytes, block: _PackedBlock) -> bytes:
        errors = require("zstandard", extra="slim").ZstdError, ValueError, MemoryError
        try:
            planes = decompressor.decompress(stored, max_output_size=block.num_bytes)
        except errors as error:
            raise self._damaged(f"a block cannot be decompressed ({error})") from None
        if len(planes) != block.num_bytes:
            raise self._damaged("a block has another length than its index says")
        return _join_planes(planes, block.width)

    def _read_index(self, file: BinaryIO) -> tuple[_PackIndex, int]:
        """The index, and where it begins."""
        size = os.fstat(file.fileno()).st_size
        if file.read(len(MARK)) != MARK:
            raise BadCheckpoint(f"{self._path} is no packed file of `shoal pack`.")
        if size < len(MARK) + _TAIL_BYTES:
            raise self._damaged("it is cut off")
        file.seek(size - _TAIL_BYTES)
        tail = file.read(_TAIL_BYTES)
        length = int.from_bytes(tail[:8], "little")
        start = size - _TAIL_BYTES - length
        if not tail.endswith(MARK) or length > _MOST_INDEX_BYTES or start < len(MARK):
            raise self._damaged("it is cut off, or its end was written over")
        file.seek(start)
        content = file.read(length)
        if xxhash.xxh3_128_digest(content) != tail[8:24]:
            raise self._damaged("its index has another hash than its tail says")
        return decode_json(content, _PackIndex, f"The index of {self._path}", BadCheckpoint), start

    def _check(self, file: PackedFile) -> None:
        """Names stay inside of the directory, and no block asks for more memory than blocks do."""
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or str(path) != file.name or "\0" in file.name:
            raise self._damaged(f"{file.name!r} is no plain name of a file")
        for block in file.blocks:
            is_sound = 0 < block.num_bytes <= BLOCK_BYTES and block.width in _ALL_WIDTHS
            if not is_sound or block.num_stored < 0:
                raise self._damaged(f"a block of {file.name} is of no possible size")
        if sum(block.num_bytes for block in file.blocks) != file.num_bytes:
            raise self._damaged(f"the blocks of {file.name} do not add up to its size")

    def _damaged(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._path} is a damaged pack: {why}. Pack its source again.")


def _files_below(folder: Path) -> list[Path]:
    """All files of a directory; anything else in it cannot be packed."""
    found = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in found:
        if not path.is_file():
            raise UsageError(f"{path} is no plain file, and cannot be packed. Take it out.")
    return found


def _name_of(file: Path, source: Path) -> str:
    return file.relative_to(source).as_posix() if file != source else source.name


def _pack_file(file: Path, name: str, pack: BinaryIO) -> PackedFile:
    compressor = require("zstandard", extra="slim").ZstdCompressor(level=LEVEL)
    hashed, blocks = xxhash.xxh3_128(), []
    num_bytes = file.stat().st_size
    with open(file, "rb") as source:
        for span in _spans(source, num_bytes):
            source.seek(span.start)
            for start in range(span.start, span.stop, BLOCK_BYTES):
                raw = source.read(min(BLOCK_BYTES, span.stop - start))
                hashed.update(raw)
                width, stored = _compress(compressor, raw, span.width)
                pack.write(stored)
                blocks.append(_PackedBlock(len(stored), len(raw), width))
    if sum(block.num_bytes for block in blocks) != num_bytes:
        raise UsageError(f"{file} changed while it was packed. Try again when it is written.")
    return PackedFile(name, num_bytes, hashed.hexdigest(), tuple(blocks))


def _compress(compressor: Any, raw: bytes, width: int) -> tuple[int, bytes]:
    """The width that was taken, and the compressed planes: the shortest, if it is not known."""
    tried = [(w, compressor.compress(_planes(raw, w))) for w in ((width,) if width else _WIDTHS)]
    return min(tried, key=lambda one: len(one[1]))


def _planes(raw: bytes, width: int) -> bytes:
    """The first byte of every number, then the second of each; what is left over comes last."""
    whole = len(raw) - len(raw) % width
    numbers = np.frombuffer(raw, np.uint8, whole).reshape(-1, width)
    return numbers.T.tobytes() + raw[whole:] if width > 1 else raw


def _join_planes(planes: bytes, width: int) -> bytes:
    whole = len(planes) - len(planes) % width
    numbers = np.frombuffer(planes, np.uint8, whole).reshape(width, -1)
    return numbers.T.tobytes() + planes[whole:] if width > 1 else planes


def _spans(file: BinaryIO, num_bytes: int) -> list[_Span]:
    """What a file is made of, in order: the header and the tensors of safetensors, or one span."""
    unknown = [_Span(0, num_bytes, 0)] if num_bytes else []
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if not 1 < length <= min(num_bytes - LENGTH_BYTES, MOST_HEADER_BYTES):
        return unknown
    header = try_decode_json(file.read(length), dict[str, Any])
    if header is None:
        return unknown
    first = LENGTH_BYTES + length
    spans = [_Span(0, first, 1)]
    for start, stop, width in _tensors(header):
        if start < spans[-1].stop - first or not start <= stop <= num_bytes - first:
            return unknown  # it only looks like a header
        spans += [
            _Span(spans[-1].stop, first + start, 1),
            _Span(first + start, first + stop, width),
        ]
    spans.append(_Span(spans[-1].stop, num_bytes, 1))
    return [span for span in spans if span.start < span.stop]


def _tensors(header: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Where the tensors begin and end behind the header, and the width of their numbers."""
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            one = msgspec.convert(entry, _TensorEntry)
        except msgspec.ValidationError:
            continue  # its bytes are packed all the same
        found.append((*one.data_offsets, ITEM_BYTES.get(one.dtype, 1)))
    return sorted(found)


def _write(path: Path, content: Iterable[bytes]) -> None:
    with open(path, "xb") as file:
        for part in content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
