"""Rows of Parquet files by index: only the columns asked for, a row group at a time.

A Parquet file is a row of groups, each with its columns compressed by themselves. A row cannot be
read alone, so its group is decoded, and the last few groups are kept. The source carries an order
that shuffles groups, and rows among as many groups as are kept, so that in a pass each process
that reads decodes a group once. `parquet(...).pairs("x", "y")` gives pairs without a function.

Cost: `window` decoded groups in memory for each process that reads, of the wanted columns. Files
with one huge group are held whole: write groups of some thousand rows. Needs the extra `parquet`.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.orders import BlockShuffled
from shoal.data.readers.columns import (
    ColumnChoice,
    ColumnPairs,
    Irregular,
    array_of,
    is_numeric,
    values_of,
)
from shoal.data.readers.files import Files, PathLike
from shoal.data.readers.records import BadRecord, Indices, normalize_indices, require_columns
from shoal.data.sources import Ids, is_outage
from shoal.data.validate import require_whole, texts_of
from shoal.errors import ShoalError, UsageError, require
from shoal.system.processes import PerProcess


class ParquetRows:
    """Made by `parquet`: each row a dict. `columns` are those that rows have."""

    def __init__(self, files: Files, columns: Sequence[str] | None, window: int):
        self.files = files
        heads = [_head(files, number) for number in range(len(files))]
        self._schema = heads[0].schema_arrow
        require_columns(columns or (), self._schema.names, files.names[0])
        self.columns = tuple(self._schema.names if columns is None else columns)
        for number, head in enumerate(heads):
            self._check_schema(number, head.schema_arrow)
        groups = [
            (number, group, head.metadata.row_group(group).num_rows)
            for number, head in enumerate(heads)
            for group in range(head.num_row_groups)
        ]
        self._groups: NDArray[np.int64] = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self._bounds = np.concatenate([[0], np.cumsum(self._groups[:, 2])])
        self.order = BlockShuffled([int(size) for size in self._groups[:, 2]], window)
        self._decoded = PerProcess(lambda: _Decoded(files, self.columns, window))

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __str__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files.names[0]}{more}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.many([index])[0]

    def many(self, ids: Indices) -> list[dict[str, Any]]:
        """Many rows; those of one group are taken together."""
        rows: list[dict[str, Any]] = [{}] * len(ids)
        for places, table in self._tables(normalize_indices(ids, len(self))):
            values = [values_of(table.column(name)) for name in self.columns]
            for place, row in zip(places, zip(*values, strict=True), strict=True):
                rows[place] = dict(zip(self.columns, row, strict=True))
        return rows

    def arrays(self, ids: Ids, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Columns of some rows, as arrays."""
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
        return self.files.identity("parquet", self.columns)

    def content_name(self) -> str:
        return self.files.content_name()

    def pairs(self, inputs: ColumnChoice, target: ColumnChoice) -> ColumnPairs:
        """Pairs for training: a column, a list or a dict of them for each of the two."""
        return ColumnPairs(self, inputs, target)

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
                raise BadRecord(
                    f"{self.files.names[file]}: row group {group} (sample {ids[places[0]]}) cannot "
                    f"be decoded: {error}"
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
    """The row groups that one process decoded last."""

    def __init__(self, files: Files, columns: Sequence[str], window: int):
        self._files, self._columns, self._window = files, list(columns), window
        self._lock = threading.Lock()  # a file's reader serves one thread at a time
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def table(self, file: int, group: int) -> Any:
        with self._lock:
            if (file, group) not in self._tables:
                reader = self._reader(file)
                # Threads of Arrow would be one more thing that a fork leaves behind.
                self._tables[file, group] = reader.read_row_group(
                    group, columns=self._columns, use_threads=False
                )
                if len(self._tables) > self._window:
                    self._tables.popitem(last=False)
            self._tables.move_to_end((file, group))
            return self._tables[file, group]

    def _reader(self, file: int) -> Any:
        if file not in self._open:
            self._open[file] = _head(self._files, file)
            if len(self._open) > self._window:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def parquet(
    paths: PathLike | Sequence[PathLike],
    *,
    columns: Sequence[str] | None = None,
    window: int = 4,
    options: Mapping[str, Any] | None = None,
) -> ParquetRows:
    """A source of the rows of one or several Parquet files, by path or URL, as dicts.

    `columns` picks some, and the others are not read. `window` is how many row groups are kept
    decoded, and how far rows are shuffled. `options` go to the back end of a URL.
    """
    require("pyarrow.parquet", "parquet")
    columns = None if columns is None else texts_of(columns, "parquet(columns=...)")
    require_whole(window, "parquet(window=...)")
    if window < 1:
        raise UsageError(f"window={window}. At least 1 row group is kept decoded.")
    return ParquetRows(Files(paths, options), columns, window)


def _head(files: Files, number: int) -> Any:
    """A reader for a file, with what its footer says."""
    library = require("pyarrow.parquet", "parquet")
    try:
        return library.ParquetFile(
            files.file(number), pre_buffer=False, page_checksum_verification=True
        )
    except ShoalError:
        raise
    except Exception as error:
        raise UsageError(f"{files.names[number]} is no Parquet file: {error}") from error
