"""Write predictions to a file, as they come: JSON lines, NumPy, safetensors or Parquet.

The suffix says which. A row is a sample, under its number in the source (`sample`), in order. JSON
lines are written at once; the other formats keep a whole column in one place, so columns are
collected in unnamed files beside the output and put together at the end. So memory holds one batch,
and a disk that is full leaves nothing (`formats/new_output.py`).

Cost: for .npz and .safetensors, twice the output on the disk for a while.
"""

import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.chunks import pack_header
from shoal.checkpoint.dtypes import dtype_name, tensor_bytes
from shoal.errors import UsageError, nearest, require
from shoal.formats.new_output import refuse_existing
from shoal.inference.columns import SAMPLE, Columns

_LOW = (torch.bfloat16, torch.float16)  # of which not every format has a word


class OutputFile(Protocol):
    """Gets batches in order, `add` with the column of samples' numbers in each, then `finish`."""

    def add(self, columns: Columns) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def check_output(path: Path) -> None:
    """Refuse a place that cannot be written, before anything is computed."""
    if path.suffix not in FORMATS:
        known = nearest(path.suffix, FORMATS)
        raise UsageError(f"--out {path}: its name says which format to write. {known}")
    refuse_existing(path)
    if path.suffix == ".parquet":
        require("pyarrow", extra="parquet")


def open_output(path: Path) -> OutputFile:
    return FORMATS[path.suffix](path)


class JsonLinesFile:
    """One object a line."""

    def __init__(self, path: Path):
        self._file = open(path, "xb")  # noqa: SIM115 (until `close`)

    def add(self, columns: Columns) -> None:
        rows = {name: _plain(column).tolist() for name, column in columns.items()}
        for values in zip(*rows.values(), strict=True):
            self._file.write(msgspec.json.encode(dict(zip(rows, values))) + b"\n")

    def finish(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _ColumnFile:
    """The rows of one column, one after another, in a file without a name."""

    def __init__(self, name: str, first: Tensor, folder: Path):
        self.name, self.dtype, self.row_shape = name, first.dtype, tuple(first.shape[1:])
        self.num_rows = 0
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (until `close`)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.row_shape)

    def add(self, rows: Tensor, suffix: str) -> None:
        if tuple(rows.shape[1:]) != self.row_shape or rows.dtype != self.dtype:
            raise UsageError(
                f"The model's {self.name} is {list(self.row_shape)} for the first sample and "
                f"{list(rows.shape[1:])} for another, and {suffix} keeps all samples in one array. "
                "Write .jsonl, which takes any shapes."
            )
        self.file.write(tensor_bytes(rows))
        self.num_rows += len(rows)

    def copy_to(self, out: IO[bytes]) -> None:
        self.file.seek(0)
        shutil.copyfileobj(self.file, out, 1 << 20)


class _ColumnFiles:
    """Columns that are put together at the end."""

    suffix = ""

    def __init__(self, path: Path):
        self._path = path
        self._columns: dict[str, _ColumnFile] = {}

    def add(self, columns: Columns) -> None:
        columns = {name: self.stored(column.detach().cpu()) for name, column in columns.items()}
        if not self._columns:
            folder = self._path.parent
            self._columns = {n: _ColumnFile(n, column, folder) for n, column in columns.items()}
        _refuse_others(self._columns, columns)
        for name, column in columns.items():
            self._columns[name].add(column, self.suffix)

    def stored(self, column: Tensor) -> Tensor:
        """A column in a type that the format has."""
        return column

    def close(self) -> None:
        for column in self._columns.values():
            column.file.close()


class NumpyFile(_ColumnFiles):
    """What `numpy.load` reads, without compression."""

    suffix = ".npz"

    def stored(self, column: Tensor) -> Tensor:
        return column.float() if column.dtype == torch.bfloat16 else column

    def finish(self) -> None:
        with zipfile.ZipFile(self._path, "x", zipfile.ZIP_STORED) as archive:
            for name, column in self._columns.items():
                kind = torch.empty(0, dtype=column.dtype).numpy().dtype
                header = {"descr": kind.str, "fortran_order": False, "shape": column.shape}
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_2_0(member, header)
                    column.copy_to(member)


class SafetensorsFile(_ColumnFiles):
    """One file of safetensors: a tensor is a column."""

    suffix = ".safetensors"

    def finish(self) -> None:
        # By falling size of elements, so that each tensor is aligned.
        ordered = sorted(self._columns.values(), key=lambda c: (-c.dtype.itemsize, c.name))
        entries, at = {}, 0
        for column in ordered:
            stop = at + column.file.seek(0, 2)
            entries[column.name] = {
                "dtype": dtype_name(column.dtype),
                "shape": column.shape,
                "data_offsets": (at, stop),
            }
            at = stop
        with open(self._path, "xb") as file:
            file.write(pack_header(entries))
            for column in ordered:
                column.copy_to(file)


class ParquetFile:
    """A row group for each batch; a row that is no single number is a list of fixed size."""

    def __init__(self, path: Path):
        self._path = path
        self._arrow = require("pyarrow", extra="parquet")
        self._parquet = require("pyarrow.parquet", extra="parquet")
        self._writer: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def add(self, columns: Columns) -> None:
        plain = {name: _plain(column) for name, column in columns.items()}
        shapes = {name: tuple(column.shape[1:]) for name, column in plain.items()}
        self._shapes = self._shapes or shapes
        _refuse_others(self._shapes, columns)
        for name, shape in shapes.items():
            if shape != self._shapes[name]:
                raise UsageError(
                    f"The model's {name} is {list(self._shapes[name])} for the first sample and "
                    f"{list(shape)} for another, and .parquet keeps them in one form. Write "
                    ".jsonl, which takes any shapes."
                )
        table = self._arrow.table({name: self._array(column) for name, column in plain.items()})
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def _array(self, column: Tensor) -> Any:
        array = self._arrow.array(column.reshape(-1).numpy())
        for size in reversed(column.shape[1:]):
            array = self._arrow.FixedSizeListArray.from_arrays(array, size)
        return array

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


FORMATS: dict[str, type[JsonLinesFile | NumpyFile | SafetensorsFile | ParquetFile]] = {
    ".jsonl": JsonLinesFile,
    ".npz": NumpyFile,
    ".safetensors": SafetensorsFile,
    ".parquet": ParquetFile,
}


def _plain(column: Tensor) -> Tensor:
    """Numbers that JSON and Parquet have: complex ones become pairs."""
    column = column.detach().cpu()
    column = torch.view_as_real(column.resolve_conj()) if column.is_complex() else column
    return column.float() if column.dtype in _LOW else column


def _refuse_others(known: Mapping[str, Any], columns: Columns) -> None:
    """A model that answers with other things for other batches has no table of answers."""
    if known.keys() != columns.keys():
        before, now = (", ".join(sorted(names.keys() - {SAMPLE})) for names in (known, columns))
        raise UsageError(
            f"The model answered with {before} for the first samples and with {now} for others. "
            "Write .jsonl, which takes rows of any form."
        )
