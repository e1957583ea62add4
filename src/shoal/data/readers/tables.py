"""Rows of Parquet, Arrow, CSV and JSON files by index, through `pyarrow.dataset`, with types.

    parquet("a.parquet", columns=["x", "y"])
    table(["a.csv", "b.csv"], where=[("split", "=", "train")]).pairs("x", "y")

A file is a row of blocks: the row groups of Parquet, the record batches of Arrow, all of a CSV or
JSON file. A row cannot be read alone, so its block is decoded, and the last few blocks are kept.
The source carries an order that shuffles blocks, and rows among as many blocks as are kept, so that
in a pass each process that reads decodes a block once. Columns that are not asked for are not read.
`where` is pushed down to the scan: row groups whose statistics rule them out are not read either.
`pairs("x", "y")` gives pairs without a function.

Cost: `window` decoded blocks in memory for each process that reads, of the wanted columns; with
`where`, one scan of its columns when the source is made. Files with one huge block are held whole:
write groups of some thousand rows, and cut CSV and JSON into files; for these `csv` and `jsonl`
read any row by itself, as text. Needs the extra `parquet`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.orders import BlockShuffled
from shoal.data.readers.columns import (
    ColumnSource,
    Irregular,
    array_of,
    is_numeric,
    values_of,
)
from shoal.data.readers.files import Files, PathLike
from shoal.data.readers.records import BadRecord, Indices, normalize_indices, require_columns
from shoal.data.sources import Ids, is_outage
from shoal.data.validate import require_whole, texts_of
from shoal.errors import ShoalError, UsageError, nearest, require
from shoal.system.processes import PerProcess

# An expression of pyarrow.dataset, or (column, operator, value) triples that must all hold.
Where: TypeAlias = Any
_FORMATS = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV", "json": "JSON"}
_ENDINGS = {"feather": "arrow", "ipc": "arrow", "jsonl": "json", "pq": "parquet"}
_BLOCKS = {"parquet": "row group", "arrow": "record batch"}


class TableRows(ColumnSource):
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
            for block in range(len(head))
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
            raise UsageError(
                f"{self.files.names[number]} cannot be filtered: {error}. Check the columns and "
                "values of `where`."
            ) from error

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files.names[0]}{more}"

    def many(self, ids: Indices) -> list[dict[str, Any]]:
        """Many rows; those of one group are taken together."""
        rows: list[dict[str, Any]] = [{}] * len(ids)
        for places, table in self._tables(normalize_indices(ids, len(self))):
            values = [values_of(table.column(name)) for name in self.columns]
            for place, row in zip(places, zip(*values, strict=True), strict=True):
                rows[place] = dict(zip(self.columns, row, strict=True))
        return rows

    def arrays(self, ids: Ids, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        parts = list(self._tables(normalize_indices(ids, len(self))))
        back = np.argsort(np.concatenate([places for places, _ in parts]))
        found = {}
        for name in names:
            of_groups = [array_of(table.column(name)) for _, table in parts]
            if len({part.shape[1:] for part in of_groups}) > 1:
                raise Irregular(f"lists of column {name!r} are of several lengths")
            found[name] = np.concatenate(of_groups)[back]
        return found

    def identity(self) -> str:
        filtered = () if self._where is None else (str(self._where),)
        return self.files.identity(self._kind, self.columns, *filtered)

    def content_name(self) -> str:
        filtered = "" if self._where is None else f" {self.identity()}"
        return f"{self.files.content_name()}{filtered}"

    def unfit(self, name: str) -> str | None:
        kind = self._schema.field(name).type
        return None if is_numeric(kind) else str(kind)

    def _tables(self, ids: Ids) -> Any:
        """For each group that is needed: the places of its rows in `ids`, and the rows."""
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
    """An open file as its blocks, each a fragment of `pyarrow.dataset`."""

    def __init__(self, source: Callable[[], Any], kind: str):
        library = require("pyarrow.dataset", "parquet")
        self._groups: Any = None
        if kind == "parquet":
            # Reading ahead is for whole scans; each page that has a checksum is checked.
            how = library.ParquetFragmentScanOptions(
                pre_buffer=False, page_checksum_verification=True
            )
            form = library.ParquetFileFormat(default_fragment_scan_options=how)
            whole = form.make_fragment(source())
            self.schema = whole.physical_schema
            self._groups = whole.split_by_row_group()
        else:
            form = {"csv": library.CsvFileFormat, "json": library.JsonFileFormat}[kind]()
            self.schema = form.inspect(source())
            # A scan closes what it reads.
            self._whole: Callable[[], Any] = lambda: form.make_fragment(source())

    def __len__(self) -> int:
        return 1 if self._groups is None else len(self._groups)

    def count(self, block: int, where: Where) -> int:
        if where is None and self._groups is not None:  # the footer says it
            return int(self._groups[block].row_groups[0].num_rows)
        return int(self.read(block, [], where).num_rows)

    def read(self, block: int, columns: list[str], where: Where) -> Any:
        found = self._whole() if self._groups is None else self._groups[block]
        how = {"schema": self.schema, "columns": columns, "filter": where}
        # Threads of Arrow would be one more thing that a fork leaves behind.
        return found.to_table(**how, use_threads=False)


class _ArrowFile(_TableFile):
    """An open file of Arrow, whose record batches are read each by itself."""

    def __init__(self, source: Callable[[], Any]):
        self._reader = require("pyarrow.ipc", "parquet").open_file(source())
        self.schema = self._reader.schema

    def __len__(self) -> int:
        return int(self._reader.num_record_batches)

    def count(self, block: int, where: Where) -> int:
        return int(self.read(block, self.schema.names, where).num_rows)

    def read(self, block: int, columns: list[str], where: Where) -> Any:
        table = require("pyarrow", "parquet").Table
        found = table.from_batches([self._reader.get_batch(block)])
        return (found if where is None else found.filter(where)).select(columns)


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
        source = partial(files.file, number)
        return _ArrowFile(source) if kind == "arrow" else _TableFile(source, kind)
    except ShoalError:
        raise
    except Exception as error:
        raise UsageError(f"{files.names[number]} is no {_FORMATS[kind]} file: {error}") from error
