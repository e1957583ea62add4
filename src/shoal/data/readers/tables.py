"""Rows of Parquet, Arrow, CSV and JSON files by index, through pyarrow, with types.

    parquet("a.parquet", columns=["x", "y"])
    table(["a.csv", "b.csv"], where=[("split", "=", "train")]).pairs("x", "y")

A file is a row of blocks: the row groups of Parquet, the record batches of Arrow, all of a CSV or
JSON file. A row cannot be read alone, so its block is decoded, and the last few blocks are kept.
The source carries an order that shuffles blocks, and rows among as many blocks as are kept, so that
in a pass each process that reads decodes a block once. Of Parquet, columns that are not asked for
are not read, nor row groups whose statistics `where` rules out. `pairs("x", "y")` gives pairs
without a function.

Cost: `window` decoded blocks in memory for each process that reads, of the wanted columns; with
`where`, one scan of its columns when the source is made. Files with one huge block are held whole:
write groups of some thousand rows, and cut CSV and JSON into files; for these `csv` and `jsonl`
read any row by itself, as text. Needs the extra `parquet`.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.orders import BlockShuffled
from shoal.data.readers.columns import ArrowRows, is_numeric
from shoal.data.readers.files import Files, PathLike
from shoal.data.readers.records import BadRecord, refuse_same_columns, require_columns
from shoal.data.sources import Ids, is_outage
from shoal.data.validate import require_whole, texts_of
from shoal.errors import ShoalError, UsageError, nearest, require
from shoal.system.processes import PerProcess

# An expression of pyarrow.dataset, or (column, operator, value) triples that must all hold.
Where: TypeAlias = Any
_FORMATS = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV", "json": "JSON"}
_ENDINGS = {"feather": "arrow", "ipc": "arrow", "jsonl": "json", "pq": "parquet"}
_BLOCKS = {"parquet": "row group", "arrow": "record batch"}
_MOST_BLOCK_BYTES = 2**31 - 1  # that Arrow parses in one piece


class TableRows(ArrowRows):
    """Made by `table` and `parquet`: each row a dict. `columns` are those that rows have."""

    recorded_as = "ParquetRows"

    def __init__(
        self, files: Files, kind: str, columns: Sequence[str] | None, where: Where, window: int
    ):
        self.files, self._kind, self._where = files, kind, where
        heads = [_open(files, number, kind) for number in range(len(files))]
        self._schema = heads[0].schema
        require_columns(columns or (), self._schema.names, files.names[0])
        self.columns = tuple(self._schema.names if columns is None else columns)
        for number, head in enumerate(heads):
            self._check_schema(number, head.schema)
        blocks = [
            (number, block, self._count(head, number, block))
            for number, head in enumerate(heads)
            for block in range(head.num_blocks)
        ]
        self._groups: NDArray[np.int64] = np.array(blocks, dtype=np.int64).reshape(-1, 3)
        self._groups = self._groups[self._groups[:, 2] > 0]
        self._bounds = np.concatenate([[0], np.cumsum(self._groups[:, 2])])
        self.order = BlockShuffled([int(size) for size in self._groups[:, 2]], window)
        self._decoded = PerProcess(lambda: _Decoded(files, kind, self.columns, where, window))

    def _count(self, head: "_TableFile", number: int, block: int) -> int:
        try:
            return head.count(block, self._where)
        except ShoalError:
            raise
        except Exception as error:
            if is_outage(error):
                raise
            wrong = "read" if self._where is None else "filtered"
            advice = "" if self._where is None else " Check the columns and values of `where`."
            raise UsageError(
                f"{self.files.names[number]} cannot be {wrong}: {error}.{advice}"
            ) from error

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files.names[0]}{more}"

    def identity(self) -> str:
        filtered = () if self._where is None else (str(self._where),)
        return self.files.identity(self._kind, self.columns, *filtered)

    def content_name(self) -> str:
        filtered = "" if self._where is None else f" {self.identity()}"
        return f"{self.files.content_name()}{filtered}"

    def unfit(self, name: str) -> str | None:
        kind = self._schema.field(name).type
        return None if is_numeric(kind) else str(kind)

    def tables(self, ids: Ids) -> Iterator[tuple[Ids, Any]]:
        """One for each group that is needed."""
        numbers = np.searchsorted(self._bounds, ids, side="right") - 1
        _, firsts = np.unique(numbers, return_index=True)
        for number in numbers[np.sort(firsts)]:  # in the order of the pass, whose groups are kept
            places = np.flatnonzero(numbers == number)
            file, group, _ = (int(value) for value in self._groups[number])
            try:
                table = self._decoded.get().table(file, group)
            except ShoalError:
                raise
            except Exception as error:
                if is_outage(error):
                    raise
                block = f"{_BLOCKS[self._kind]} {group} " if self._kind in _BLOCKS else ""
                raise BadRecord(
                    f"{self.files.names[file]}: {block}(sample {ids[places[0]]}) cannot be "
                    f"decoded: {error}"
                ) from error
            yield places, table.take(ids[places] - self._bounds[number])

    def _check_schema(self, number: int, schema: Any) -> None:
        refuse_same_columns(schema.names, self.files.names[number])
        require_columns(self.columns, schema.names, self.files.names[number])
        for name in self.columns:
            kind, first = schema.field(name).type, self._schema.field(name).type
            if kind != first:
                raise UsageError(
                    f"column {name!r} holds {kind} in {self.files.names[number]} and {first} in "
                    f"{self.files.names[0]}. Files of one source must agree."
                )


class _Decoded:
    """The blocks that one process decoded last."""

    def __init__(self, files: Files, kind: str, columns: Sequence[str], where: Where, window: int):
        self._lock = threading.Lock()  # a file's reader serves one thread at a time
        names, opened = list(columns), lru_cache(window)(lambda file: _open(files, file, kind))
        self._read = lru_cache(window)(
            lambda file, block: opened(file).read(block, names, where)  # of no cycle of references
        )

    def table(self, file: int, block: int) -> Any:
        with self._lock:
            return self._read(file, block)


class _TableFile:
    """An open file as its blocks. One thread uses it at a time."""

    schema: Any
    num_blocks = 1

    def count(self, block: int, where: Where) -> int:
        return int(self.read(block, self.schema.names, where).num_rows)

    def read(self, block: int, columns: list[str], where: Where) -> Any:
        raise NotImplementedError


class _ParquetFile(_TableFile):
    """Each row group is a fragment of `pyarrow.dataset`, which reads no more than it must."""

    def __init__(self, source: Any):
        library = require("pyarrow.dataset", "parquet")
        # Reading ahead is for whole scans; each page that has a checksum is checked.
        how = library.ParquetFragmentScanOptions(pre_buffer=False, page_checksum_verification=True)
        whole = library.ParquetFileFormat(default_fragment_scan_options=how).make_fragment(source)
        self.schema = whole.physical_schema
        self._groups = whole.split_by_row_group()
        self.num_blocks = len(self._groups)

    def count(self, block: int, where: Where) -> int:
        if where is None:  # the footer says it
            return int(self._groups[block].row_groups[0].num_rows)
        return int(self.read(block, [], where).num_rows)

    def read(self, block: int, columns: list[str], where: Where) -> Any:
        how = {"schema": self.schema, "columns": columns, "filter": where}
        # Threads of Arrow would be one more thing that a fork leaves behind.
        return self._groups[block].to_table(**how, use_threads=False)


class _ArrowFile(_TableFile):
    """Each record batch is read by itself."""

    def __init__(self, source: Any):
        self._reader = require("pyarrow.ipc", "parquet").open_file(source)
        self.schema = self._reader.schema
        self.num_blocks = int(self._reader.num_record_batches)

    def read(self, block: int, columns: list[str], where: Where) -> Any:
        table = require("pyarrow", "parquet").Table
        return _selected(table.from_batches([self._reader.get_batch(block)]), columns, where)


class _TextFile(_TableFile):
    """A CSV or JSON file, parsed as a whole: the scan of a dataset takes fields and types from the
    first megabyte, drops fields that come later, and loses quoted newlines at its cuts.

    It is parsed from memory. A parser that failed may ask its file for more until the process
    ends, and aborts that if the file is an object of Python.
    """

    def __init__(self, read: Callable[[], bytes], kind: str):
        self._read, self._kind = read, kind
        parsed = self._parsed()
        self.schema, self._num_rows = parsed.schema, int(parsed.num_rows)

    def count(self, block: int, where: Where) -> int:
        return self._num_rows if where is None else super().count(block, where)

    def read(self, block: int, columns: list[str], where: Where) -> Any:
        return _selected(self._parsed(), columns, where)

    def _parsed(self) -> Any:
        library = require(f"pyarrow.{self._kind}", "parquet")
        content = self._read()
        # In one piece as far as can be: an error counts rows from the beginning of a piece.
        how = {"use_threads": False, "block_size": min(len(content) + 1, _MOST_BLOCK_BYTES)}
        return getattr(library, f"read_{self._kind}")(
            require("pyarrow", "parquet").BufferReader(content),
            read_options=library.ReadOptions(**how),
            parse_options=library.ParseOptions(newlines_in_values=self._kind == "csv"),
        )


def _selected(table: Any, columns: list[str], where: Where) -> Any:
    return (table if where is None else table.filter(where)).select(columns)


def table(
    paths: PathLike | Sequence[PathLike],
    *,
    kind: str | None = None,
    columns: Sequence[str] | None = None,
    where: Where = None,
    window: int = 4,
    options: Mapping[str, Any] | None = None,
) -> TableRows:
    """A source of the rows of one or several files, by path or URL, as dicts with types.

    `kind` is "parquet", "arrow", "csv" or "json" (a value a line); by default the ending says it.
    `columns` picks some, and the others are not read. `where` keeps some rows: triples such as
    ("year", ">=", 2020), which must all hold, or an expression of pyarrow.dataset. `window` is how
    many blocks are kept decoded, and how far rows are shuffled. `options` go to the back end of a
    URL.
    """
    require("pyarrow.dataset", "parquet")
    columns = None if columns is None else texts_of(columns, "table(columns=...)")
    require_whole(window, "table(window=...)")
    if window < 1:
        raise UsageError(f"window={window}. At least 1 block is kept decoded.")
    files = Files(paths, options)
    ending = files.names[0].partition("?")[0].rpartition(".")[2].lower()
    kind = _ENDINGS.get(ending, ending) if kind is None else kind
    if kind not in _FORMATS:
        raise UsageError(f"{kind!r} is no kind of table. {nearest(kind, _FORMATS)}")
    return TableRows(files, kind, columns, _expression(where), window)


def parquet(
    paths: PathLike | Sequence[PathLike],
    *,
    columns: Sequence[str] | None = None,
    where: Where = None,
    window: int = 4,
    options: Mapping[str, Any] | None = None,
) -> TableRows:
    """`table` for files of Parquet, whatever their names end with."""
    more: dict[str, Any] = {"columns": columns, "where": where, "window": window}
    return table(paths, kind="parquet", options=options, **more)


def _expression(where: Where) -> Any:
    if where is None or isinstance(where, require("pyarrow.dataset", "parquet").Expression):
        return where
    try:
        return require("pyarrow.parquet", "parquet").filters_to_expression(where)
    except Exception as error:
        raise UsageError(
            f"where={where!r} is no filter: {error}. Give triples, as in "
            '[("year", ">=", 2020)], or an expression of pyarrow.dataset.'
        ) from error


def _open(files: Files, number: int, kind: str) -> _TableFile:
    """A file with what its head says."""
    try:
        if kind in ("csv", "json"):
            return _TextFile(lambda: b"".join(files.blocks(number)), kind)
        return (_ParquetFile if kind == "parquet" else _ArrowFile)(files.file(number))
    except ShoalError:
        raise
    except Exception as error:
        raise UsageError(f"{files.names[number]} is no {_FORMATS[kind]} file: {error}") from error
