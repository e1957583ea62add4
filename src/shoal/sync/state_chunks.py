"""States of any size, a chunk at a time: how the state of servers passes through a worker.

A state is listed as parts of at most 8 MB, in an order that both sides know, and some parts are
sent at a time. Received chunks go to an unnamed spill file, which the system may move out of memory
at any time. So neither a save nor a load takes memory by the size of a table.

Cost: a pass through the page cache, beyond the first chunk. The file lies in TMPDIR, or else in
/var/tmp, which unlike /tmp is on a disk everywhere.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from shoal.comm.wire import bytes_of
from shoal.parallel.boxes import split_box, whole_box
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, whole_slice
from shoal.parallel.striping import Stripes
from shoal.sync.lazy_tables import part_name, rows_name, stripes_in
from shoal.sync.state import (
    ALIKE,
    BY_ROW,
    DICT,
    GROUPS,
    KIND,
    LIST,
    TENSOR,
    TUPLE,
    OptimizedPart,
    ShardedState,
    StateSource,
)

CHUNK_BYTES = 8 << 20
_ALIGNMENT = 64  # bytes, of tensors in a file


class StateChunk(NamedTuple):
    """Some parts of a state. What is plain comes with the first."""

    state: ShardedState
    next: int  # the number of the first part that is not in it, 0 if there is none


def chunk_at(state: ShardedState, first: int) -> StateChunk:
    """The parts of a state from number `first` on, as many as a chunk holds."""
    parts = list(_parts(state))
    if not 0 <= first <= len(parts):
        raise ValueError(f"there is no part {first} in a state of {len(parts)}")
    tensors: dict[str, list[Slice]] = {}
    at, total = first, 0
    while at < len(parts) and (at == first or total + parts[at][1].tensor.nbytes <= CHUNK_BYTES):
        name, part = parts[at]
        tensors.setdefault(name, []).append(part)
        at, total = at + 1, total + part.tensor.nbytes
    plain = state.plain if first == 0 else {}
    return StateChunk(ShardedState(tensors, plain), at if at < len(parts) else 0)


def split_state(state: ShardedState) -> Iterator[StateChunk]:
    """All of a state."""
    chunk = chunk_at(state, 0)
    yield chunk
    while chunk.next:
        chunk = chunk_at(state, chunk.next)
        yield chunk


def _parts(state: ShardedState) -> Iterator[tuple[str, Slice]]:
    for name, slices in state.tensors.items():
        for tensor, shape, start in slices:
            for box in split_box(whole_box(tensor.shape), CHUNK_BYTES // tensor.itemsize):
                offset = tuple(a + b for a, b in zip(start, box.offset, strict=True))
                yield name, Slice(box.of(tensor), shape, offset)


def outline_state(
    source: StateSource,
    runs: Iterable[tuple[OptimizedPart, tuple[int, ...]]],
    holding: LocalLayout = WHOLE,
) -> ShardedState:
    """What of a state belongs to some runs of elements, each given with its shape; no values.
    They are runs of what a rank with this `holding` has."""
    tensors: dict[str, list[Slice]] = {}
    plain = {name: source.plain[name] for name in (KIND, GROUPS)}
    wholes = list(_tensor_names(plain[GROUPS], GROUPS))
    for run, shape in runs:
        path = f"optimizer.{run.name}"
        alike, by_row = [f"model.{run.name}"], []
        if path in source.plain:
            plain[path] = source.plain[path]
            marked = list(_tensor_names(plain[path], path))
            alike += [name for name, kind in marked if kind == ALIKE]
            by_row = [name for name, kind in marked if kind == BY_ROW]
            wholes += [(name, kind) for name, kind in marked if kind == TENSOR]
        lazy = stripes_in(source, run) if isinstance(run, Stripes) else []
        if lazy:
            names = [n for s in lazy for n in _of_stripe(s, run.name, (*alike, *by_row))]
            tensors |= {name: [_outlined(source, name)] for name in names}
            continue
        for name in (*alike, *by_row):
            own = (shape[0], *source.shape(name)[1:]) if name in by_row else shape
            made = torch.empty(own, dtype=source.dtype(name), device="meta")
            parts = run.row_parts(made, holding) if name in by_row else run.parts(made, holding)
            tensors.setdefault(name, []).extend(parts)
    for name, _ in wholes:
        tensors[name] = [_outlined(source, name)]
    return ShardedState(tensors, plain)


def _outlined(source: StateSource, name: str) -> Slice:
    return whole_slice(torch.empty(source.shape(name), dtype=source.dtype(name), device="meta"))


def _of_stripe(stripe: int, table: str, names: Sequence[str]) -> list[str]:
    return [rows_name(stripe, table), *(part_name(stripe, name) for name in names)]


def _tensor_names(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The names of the tensors that belong into what is plain, and of which kind each is."""
    if not isinstance(value, dict):
        return
    ((kind, content),) = value.items()
    if kind in (TENSOR, ALIKE, BY_ROW):
        yield path, kind
    elif kind == DICT:
        for key, part in content:
            yield from _tensor_names(part, f"{path}.{key}")
    elif kind in (LIST, TUPLE):
        for number, part in enumerate(content):
            yield from _tensor_names(part, f"{path}.{number}")


def read_outline(source: StateSource, outline: ShardedState) -> ShardedState:
    """The tensors of an outline, filled from a source."""
    tensors = {
        name: [s._replace(tensor=torch.empty_like(s.tensor, device="cpu")) for s in slices]
        for name, slices in outline.tensors.items()
    }
    for name, slices in tensors.items():
        source.fill(name, slices)
    return ShardedState(tensors, outline.plain)


class _FileSpan(NamedTuple):
    """A tensor in a file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SpillFile:
    """A state that comes in chunks; beyond the first they go to an unnamed file."""

    def __init__(self) -> None:
        self._plain: dict[str, object] = {}
        self._put: list[tuple[str, Slice, _FileSpan | None]] = []
        self._file: BinaryIO | None = None
        self._end = self._in_memory = 0

    def add(self, state: ShardedState) -> None:
        """OSError if there is no room on the disk."""
        self._plain.update(state.plain)
        for name, parts in state.tensors.items():
            for part in parts:
                self._put.append((name, part, None))
                self._in_memory += part.tensor.nbytes
        if self._in_memory > CHUNK_BYTES:
            self._put = [(name, part, put or self._write(part)) for name, part, put in self._put]
            self._put = [(name, _without(part), put) for name, part, put in self._put]
            self._in_memory = 0

    def state(self) -> ShardedState:
        """All that came. Its tensors are private copies."""
        tensors: dict[str, list[Slice]] = {}
        memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None and self._end:
            self._file.truncate(self._end)
            mapped = mmap.mmap(self._file.fileno(), self._end)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
        for name, part, put in self._put:
            if put is not None:
                length = torch.Size(put.shape).numel() * put.dtype.itemsize
                flat = memory[put.start : put.start + length].view(put.dtype)
                part = part._replace(tensor=flat.view(put.shape))
            tensors.setdefault(name, []).append(part)
        return ShardedState(tensors, self._plain, frozenset(tensors))

    def _write(self, part: Slice) -> _FileSpan:
        if self._file is None:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (closed with this object)
                dir=_directory(), buffering=0
            )
        start = self._end
        content = memoryview(bytes_of(part.tensor.contiguous()))
        at = 0
        while at < len(content):
            at += os.pwrite(self._file.fileno(), content[at:], start + at)
        self._end = start + at + -at % _ALIGNMENT
        return _FileSpan(start, part.tensor.dtype, tuple(part.tensor.shape))


def _without(part: Slice) -> Slice:
    return part._replace(tensor=part.tensor.new_empty(0))


def allocate_spillable(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for a tensor: in memory, or if it is large in a file without a name."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes > CHUNK_BYTES:
        try:
            with tempfile.TemporaryFile(dir=_directory()) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # or else a full disk ends us
                mapped = mmap.mmap(file.fileno(), num_bytes)
            return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(*shape)
        except OSError:
            pass  # there may be room in memory
    return torch.empty(tuple(shape), dtype=dtype)


def _directory() -> str | None:
    """None is wherever Python puts what is temporary."""
    if os.environ.get("TMPDIR"):
        return None
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else None


def without_values(state: ShardedState) -> ShardedState:
    """The names and types of a state's tensors, without a value."""
    found = {name: parts[0].tensor for name, parts in state.tensors.items() if parts}
    return ShardedState(
        {name: [whole_slice(tensor.new_empty(0))] for name, tensor in found.items()}, {}
    )
