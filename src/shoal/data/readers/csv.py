"""Tables as text: each row a dict from column to text, one read away.

Fields are separated by a delimiter; one that holds a delimiter, a quote or a newline stands in
quotes, with quotes inside doubled (RFC 4180); Python's `csv` splits such rows. Blank lines are left
out. Nothing is guessed: a row with more or fewer fields than the header is a `BadRecord` with its
line, and values stay text until a function of your own makes numbers of them.

Cost and limits: `linewise.py`. For large tables of numbers Parquet is smaller and faster.
"""

import csv as standard
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.readers.files import PathLike
from shoal.data.readers.linewise import LineRecords, QuoteStyle
from shoal.data.readers.records import hash_parts, refuse_same_columns, require_columns
from shoal.data.validate import texts_of
from shoal.errors import UsageError


class CsvRows(LineRecords):
    """Made by `csv`. `names` are the columns in the files, `columns` those that samples have."""

    recorded_as = "Rows"

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        encoding: str,
        options: Mapping[str, Any] | None,
        *,
        names: Sequence[str] | None,
        delimiter: str,
        quote: str | None,
    ):
        super().__init__(paths, encoding, options)
        self.delimiter, self.quote = delimiter, quote
        quotes = None if quote is None else QuoteStyle(ord(quote), ord(delimiter))
        scanned = [self._scan(at, quotes).without_blank() for at in range(len(self.files))]
        self.names = tuple(names or ())
        if names is None:
            for number, spans in enumerate(scanned):
                self._take_header(number, spans.starts, spans.stops)
            scanned = [type(spans)(spans.starts[1:], spans.stops[1:]) for spans in scanned]
        if not self.names:
            raise UsageError("names=[] names no column. A table has at least one.")
        refuse_same_columns(self.names, self.files.names[0])
        self.columns = self.names
        self._index(scanned)

    def identity(self) -> str:
        settings = (len(self), self.names, self.columns, self.delimiter, self.quote)
        return hash_parts(super().identity(), *settings)

    def decoded(self, text: str, index: int) -> dict[str, str]:
        try:
            fields = split_row(text, self.delimiter, self.quote)
        except ValueError as error:
            raise self.bad(index, f"{error}.") from None
        if len(fields) != len(self.names):
            raise self.bad(
                index,
                f"{len(fields)} fields, where the table has {len(self.names)} columns. A field "
                f"that holds {self.delimiter!r} must stand in quotes.",
            )
        row = dict(zip(self.names, fields, strict=True))
        return row if self.columns == self.names else {name: row[name] for name in self.columns}

    def _take_header(self, number: int, starts: Any, stops: Any) -> None:
        if not len(starts):
            raise UsageError(
                f"{self.files.names[number]} is empty. It must have a header; or pass names=[...] "
                "for files without one."
            )
        content = self.files.read(number, int(starts[0]), int(stops[0]))
        try:
            text = content.decode(self.encoding)
            names = tuple(split_row(text, self.delimiter, self.quote))
        except UnicodeDecodeError as error:
            said = self._undecoded(content, error)
            raise UsageError(f"{self.files.names[number]}: in the header, {said}") from None
        except ValueError as error:
            raise UsageError(f"{self.files.names[number]}: in the header, {error}.") from None
        if number and names != self.names:
            raise UsageError(
                f"{self.files.names[number]} has the columns {', '.join(names)}, and "
                f"{self.files.names[0]} has {', '.join(self.names)}. Files of one source must have "
                "the same header."
            )
        self.names = names


def csv(
    paths: PathLike | Sequence[PathLike],
    *,
    columns: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    quote: str | None = '"',
    encoding: str = "utf-8",
    options: Mapping[str, Any] | None = None,
) -> CsvRows:
    """A source of the rows of one or several files, by path or URL, as dicts of text.

    The first row of each file names the columns, unless `names` does. `columns` picks some of
    them. `quote=None` says that quotes mean nothing. `options` go to the back end of a URL.
    """
    for what, value in (("delimiter", delimiter), ("quote", '"' if quote is None else quote)):
        is_one = isinstance(value, str) and len(value) == 1 and value.isascii()
        if not is_one or value in "\r\n":
            raise UsageError(f"{what}={value!r}. It must be one ASCII character.")
    if delimiter == quote:
        raise UsageError(f"delimiter and quote are both {quote!r}. They must differ.")
    names = None if names is None else texts_of(names, "csv(names=...)")
    rows = CsvRows(paths, encoding, options, names=names, delimiter=delimiter, quote=quote)
    if columns is not None:
        columns = texts_of(columns, "csv(columns=...)")
        require_columns(columns, rows.names, rows.files.names[0])
        rows.columns = tuple(columns)
    return rows


def split_row(text: str, delimiter: str, quote: str | None) -> list[str]:
    """The fields of a row, which may hold newlines; a ValueError says what is wrong with one."""
    if quote is None or quote not in text:
        return text.split(delimiter)
    if text.endswith("\r"):  # which the library would pass over
        raise ValueError("a carriage return stands behind the last field")
    if standard.field_size_limit() < len(text):  # of this process: 128 KB by default
        standard.field_size_limit(sys.maxsize)
    try:
        (fields,) = standard.reader([text], delimiter=delimiter, quotechar=quote, strict=True)
    except standard.Error as error:
        raise ValueError(str(error)) from None
    return fields
