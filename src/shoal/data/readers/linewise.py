"""Records that are lines of files: where each begins and ends, found in one pass.

    lines("corpus.txt")[i]      text: line i + 1 without its end; blank lines count
    jsonl("samples.jsonl")[i]   the value in a line, mostly an object, which comes as a dict

The index is two numbers a record, so any record is one read away whatever stands before it. A
newline between quotes belongs to its record: quotes are counted, and a newline after an odd number
of them does not end anything. That holds as long as quotes open only where a field begins, which
is checked. Lines end in a newline, with or without a carriage return before it; a file whose lines
end in a carriage return alone, or that is compressed, is refused.

Blank lines are left out of JSON. A line is parsed when it is asked for, so a bad one is a
`BadRecord` with its file and line, and the others stay usable. NaN and Infinity are not JSON and
are refused.

Cost: one reading of every file when the source is made, 16 bytes a record kept. Not for files that
grow: a file that changed is refused. Next: `csv.py`.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.data.readers.files import Files, PathLike, refuse_compressed
from shoal.data.readers.records import BadRecord, hash_parts
from shoal.data.sources import normalize_index, recorded_name
from shoal.data.validate import text_of
from shoal.errors import UsageError

_NEWLINE, _RETURN = 10, 13
_LOOKED_AT_BYTES = 1 << 20  # for how lines end
_MARK = b"\xef\xbb\xbf"  # what some editors put before UTF-8


class QuoteStyle(NamedTuple):
    """What quotes a field, and what stands before one that opens; each a byte."""

    quote: int
    delimiter: int


class StrayQuote(Exception):
    """A quote that opens in the middle of a field, by its offset in the file."""

    def __init__(self, offset: int):
        self.offset = offset


class Spans(NamedTuple):
    """Where the lines of a file begin and end, without what ends them."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def without_blank(self) -> "Spans":
        filled = self.stops > self.starts
        return Spans(self.starts[filled], self.stops[filled])


def spans_of(blocks: Iterable[bytes], quotes: QuoteStyle | None = None) -> Spans:
    """The lines of a file that is given block by block, however it is cut."""
    ends, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    offset, num_quotes, before = 0, 0, _NEWLINE
    for block in blocks:
        content = np.frombuffer(block, np.uint8)
        newlines = np.flatnonzero(content == _NEWLINE)
        if quotes is not None:
            places = np.flatnonzero(content == quotes.quote)
            opening = places[num_quotes % 2 :: 2]
            _check_opening(_before(content, opening, before), opening + offset, quotes)
            newlines = newlines[(np.searchsorted(places, newlines) + num_quotes) % 2 == 0]
            num_quotes += len(places)
        returns = _before(content, newlines, before) == _RETURN
        ends.append(newlines + offset)
        stops.append(newlines + offset - returns)
        before = int(content[-1]) if len(content) else before
        offset += len(content)
    if num_quotes % 2:
        raise StrayQuote(-1)
    starts = np.concatenate([[0], np.concatenate(ends) + 1]).astype(np.int64)
    if starts[-1] == offset:  # the last newline ends the last line and begins none
        return Spans(starts[:-1], np.concatenate(stops))
    return Spans(starts, np.concatenate([*stops, [offset]]).astype(np.int64))


class LineRecords:
    """Records of one line each, over one or several files; the readers decode them."""

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        encoding: str = "utf-8",
        options: Mapping[str, Any] | None = None,
    ):
        self.encoding = _one_byte_newlines(encoding)
        self.files = Files(paths, options)
        self._starts = self._stops = np.empty(0, np.int64)
        self._hashes: list[str] = []
        self._bounds = np.zeros(1, np.int64)  # where the records of each file begin, in all

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Any:
        at = normalize_index(index, len(self))
        return self.decoded(self.text(at), at)

    def decoded(self, text: str, index: int) -> Any:
        """The record in a line. For readers to override; called with a valid index."""
        return text

    def identity(self) -> str:
        """A name for the content: every byte was read to find the lines."""
        return hash_parts(recorded_name(self), self.encoding, *self._hashes)

    def text(self, index: int) -> str:
        """A record as it stands in its file."""
        number, start, stop = self._place(index)
        content = self.files.read(number, start, stop)
        try:
            return content.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise self.bad(index, self._undecoded(content, error), error.start) from None

    def bad(self, index: int, reason: str, at: int = 0) -> BadRecord:
        """The error of a record, with its file and line; `at` is a place in the record."""
        number, start, _ = self._place(index)
        return BadRecord(f"{self._where(number, start + at)} (sample {index}): {reason}")

    def _index(self, spans: Sequence[Spans]) -> None:
        """Take over where the records of each file are; called once."""
        self._starts = np.concatenate([self._starts, *(of.starts for of in spans)])
        self._stops = np.concatenate([self._stops, *(of.stops for of in spans)])
        self._bounds = np.cumsum([0, *(len(of.starts) for of in spans)], dtype=np.int64)

    def _scan(self, number: int, quotes: QuoteStyle | None = None) -> Spans:
        """The lines of a file."""
        refuse_compressed(self.files, number, "line")
        start = self.files.read(number, 0, min(_LOOKED_AT_BYTES, self.files.num_bytes(number)))
        first = start.partition(b"\n")[0].removesuffix(b"\r")
        # Within a line it may be meant, but not in the first of a table, outside of quotes.
        is_table = quotes is not None and bytes([quotes.quote]) not in first
        if b"\r" in first and (is_table or b"\n" not in start):
            raise UsageError(
                f"{self.files.names[number]}: lines end with CR alone, so many would be one "
                "line. Convert it once with: tr '\\r' '\\n' < OLD > NEW, and name the new file."
            )
        try:
            spans = spans_of(self._hashed(number), quotes)
        except StrayQuote as stray:
            raise UsageError(self._stray(number, stray.offset)) from None
        if len(spans.starts) and self.encoding == "utf-8" and start.startswith(_MARK):
            spans.starts[0] = 3
        return spans

    def _hashed(self, number: int) -> Iterator[bytes]:
        content = xxhash.xxh3_128()
        for block in self.files.blocks(number):
            content.update(block)
            yield block
        self._hashes.append(content.hexdigest())

    def _place(self, index: int) -> tuple[int, int, int]:
        number = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return number, int(self._starts[index]), int(self._stops[index])

    def _undecoded(self, content: bytes, error: UnicodeDecodeError) -> str:
        return (
            f"byte 0x{content[error.start]:02x} is not {self.encoding}. Name the encoding of the "
            'file, as encoding="latin-1".'
        )

    def _where(self, number: int, offset: int) -> str:
        """File and line of an offset; lines are counted only when one is to be named."""
        line, seen = 1, 0
        for block in self.files.blocks(number):
            line += block[: max(0, offset - seen)].count(b"\n")
            seen += len(block)
            if seen >= offset:
                break
        return f"{self.files.names[number]}, line {line}"

    def _stray(self, number: int, offset: int) -> str:
        if offset < 0:
            return (
                f"{self.files.names[number]} ends inside a quoted field. A quote that opens must "
                "close; or pass quote=None if quotes mean nothing in this file."
            )
        return (
            f"{self._where(number, offset)}: a quote stands inside a field that is not quoted. "
            "Quotes open where a field begins, and are doubled within it; or pass quote=None if "
            "they mean nothing in this file."
        )


class Lines(LineRecords):
    """Made by `lines`."""

    def __init__(
        self, paths: PathLike | Sequence[PathLike], encoding: str, options: Mapping[str, Any] | None
    ):
        super().__init__(paths, encoding, options)
        self._index([self._scan(number) for number in range(len(self.files))])


def lines(
    paths: PathLike | Sequence[PathLike],
    *,
    encoding: str = "utf-8",
    options: Mapping[str, Any] | None = None,
) -> Lines:
    """A source of text: each line of one or several files, by path or URL.

    `options` go to the back end of a URL, as those of fsspec do.
    """
    return Lines(paths, encoding, options)


class JsonLines(LineRecords):
    """Made by `jsonl`."""

    def __init__(self, paths: PathLike | Sequence[PathLike], options: Mapping[str, Any] | None):
        super().__init__(paths, "utf-8", options)
        scanned = (self._scan(number) for number in range(len(self.files)))
        self._index([spans.without_blank() for spans in scanned])

    def decoded(self, text: str, index: int) -> Any:
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.bad(index, f"no JSON: {error}. Each line must hold one value.") from None


def jsonl(
    paths: PathLike | Sequence[PathLike], *, options: Mapping[str, Any] | None = None
) -> JsonLines:
    """A source of what the lines of JSON files hold; paths or URLs, in UTF-8.

    `options` go to the back end of a URL, as those of fsspec do.
    """
    return JsonLines(paths, options)


def _before(content: NDArray[np.uint8], places: NDArray[np.int64], before: int) -> NDArray[Any]:
    """The bytes before some places of a block; `before` stands before the block."""
    found = content[places - 1]
    if len(places) and places[0] == 0:
        found[0] = before
    return found


def _check_opening(found: NDArray[Any], offsets: NDArray[np.int64], quotes: QuoteStyle) -> None:
    allowed = np.isin(found, [quotes.delimiter, quotes.quote, _NEWLINE])
    if len(offsets) and offsets[0] == len(_MARK) and found[0] == _MARK[-1]:
        allowed[0] = True
    if not allowed.all():
        raise StrayQuote(int(offsets[~allowed][0]))


def _one_byte_newlines(encoding: str) -> str:
    """The encoding's own name; refuses one in which a byte 10 may be no newline."""
    try:
        name = codecs.lookup(text_of(encoding, "encoding")).name
        whole = bytes(range(256)).decode(name, "replace") if name != "utf-8" else ""
    except (LookupError, UnicodeError):
        raise UsageError(f"encoding={encoding!r} is not known, or is not for text.") from None
    if name != "utf-8" and len(whole) != 256:
        raise UsageError(
            f"encoding={encoding!r} takes several bytes for some characters, so lines cannot be "
            "found by their bytes. Use a file in UTF-8, or in an encoding of one byte each."
        )
    return name
