"""States of any size, a stretch at a time: how what servers hold passes through a worker.

A state is listed as parts of at most 8 MB, in an order that both sides know, and sent some of them
at a time. What comes is put away in a file without a name, which the system may move out of memory
at any time, and read from there. So neither a save nor a load takes memory by the size of a table.

Cost: a pass through the page cache, beyond the first stretch. The file lies in TMPDIR, or else in
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
from shoal.parallel.boxes import pieces, whole_box
from shoal.parallel.layout import WHOLE, Slice, whole
from shoal.parallel.striping import Stripes
from shoal.sync.state import (
    ALIKE,
    BY_ROW,
    DICT,
    GROUPS,
    KIND,
    LIST,
    TENSOR,
    TUPLE,
    Source,
    State,
    Stepped,
)
from shoal.sync.touched import part_name, rows_name, stripes_in

STRETCH_BYTES = 8 << 20
_ALIGNMENT = 64  # bytes, of tensors in a file


class Stretch(NamedTuple):
    """Some parts of a state. What is plain comes with the first."""

    state: State
    next: int  # the number of the first part that is not in it, 0 if there is none


def stretch_of(state: State, first: int) -> Stretch:
    """The parts of a state from number `first` on, as many as a stretch holds."""
    parts = list(_parts(state))
    if not 0 <= first <= len(parts):
        raise ValueError(f"there is no part {first} in a state of {len(parts)}")
    tensors: dict[str, list[Slice]] = {}
    at, total = first, 0
    while at < len(parts) and (at == first or total + parts[at][1].tensor.nbytes <= STRETCH_BYTES):
        name, part = parts[at]
        tensors.setdefault(name, []).append(part)
        at, total = at + 1, total + part.tensor.nbytes
    plain = state.plain if first == 0 else {}
    return Stretch(State(tensors, plain), at if at < len(parts) else 0)


def stretches_of(state: State) -> Iterator[Stretch]:
    """All of a state."""
    stretch = stretch_of(state, 0)
    yield stretch
    while stretch.next:
        stretch = stretch_of(state, stretch.next)
        yield stretch


def _parts(state: State) -> Iterator[tuple[str, Slice]]:
    for name, slices in state.tensors.items():
        for tensor, shape, start in slices:
            for box in pieces(whole_box(tensor.shape), STRETCH_BYTES // tensor.itemsize):
                offset = tuple(a + b for a, b in zip(start, box.offset, strict=True))
                yield name, Slice(box.of(tensor), shape, offset)


def outline_of(source: Source, runs: Iterable[tuple[Stepped, tuple[int, ...]]]) -> State:
    """What of a state belongs to some runs of elements, each given with its shape; no values."""
    tensors: dict[str, list[Slice]] = {}
    plain = {name: source.plain[name] for name in (KIND, GROUPS)}
    wholes = list(_marked(plain[GROUPS], GROUPS))
    for run, shape in runs:
        path = f"optimizer.{run.name}"
        alike, by_row = [f"model.{run.name}"], []
        if path in source.plain:
            plain[path] = source.plain[path]
            marked = list(_marked(plain[path], path))
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
            parts = run.row_parts(made, WHOLE) if name in by_row else run.parts(made, WHOLE)
            tensors.setdefault(name, []).extend(parts)
    for name, _ in wholes:
        tensors[name] = [_outlined(source, name)]
    return State(tensors, plain)


def _outlined(source: Source, name: str) -> Slice:
    return whole(torch.empty(source.shape(name), dtype=source.dtype(name), device="meta"))


def _of_stripe(stripe: int, table: str, names: Sequence[str]) -> list[str]:
    return [rows_name(stripe, table), *(part_name(stripe, name) for name in names)]


def _marked(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The names of the tensors that belong into what is plain, and of which kind each is."""
    if not isinstance(value, dict):
        return
    ((kind, content),) = value.items()
    if kind in (TENSOR, ALIKE, BY_ROW):
        yield path, kind
    elif kind == DICT:
        for key, part in content:
            yield from _marked(part, f"{path}.{key}")
    elif kind in (LIST, TUPLE):
        for number, part in enumerate(content):
            yield from _marked(part, f"{path}.{number}")


def read(source: Source, outline: State) -> State:
    """The tensors of an outline, filled from a source."""
    tensors = {
        name: [s._replace(tensor=torch.empty_like(s.tensor, device="cpu")) for s in slices]
        for name, slices in outline.tensors.items()
    }
    for name, slices in tensors.items():
        source.fill(name, slices)
    return State(tensors, outline.plain)


class _Put(NamedTuple):
    """A tensor in a file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Spool:
    """A state that comes in stretches; beyond the first it is put away in a file."""

    def __init__(self) -> None:
        self._plain: dict[str, object] = {}
        self._put: list[tuple[str, Slice, _Put | None]] = []
        self._file: BinaryIO | None = None
        self._end = self._in_memory = 0

    def add(self, state: State) -> None:
        """OSError if there is no room on the disk."""
        self._plain.update(state.plain)
        for name, parts in state.tensors.items():
            for part in parts:
                self._put.append((name, part, None))
                self._in_memory += part.tensor.nbytes
        if self._in_memory > STRETCH_BYTES:
            self._put = [(name, part, put or self._write(part)) for name, part, put in self._put]
            self._put = [(name, _without(part), put) for name, part, put in self._put]
            self._in_memory = 0

    def state(self) -> State:
        """All that came. Its tensors are copies that nobody else has."""
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
        return State(tensors, self._plain, frozenset(tensors))

    def _write(self, part: Slice) -> _Put:
        if self._file is None:
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 (it goes with the spool)
                dir=_directory(), buffering=0
            )
        start = self._end
        content = memoryview(bytes_of(part.tensor.contiguous()))
        at = 0
        while at < len(content):
            at += os.pwrite(self._file.fileno(), content[at:], start + at)
        self._end = start + at + -at % _ALIGNMENT
        return _Put(start, part.tensor.dtype, tuple(part.tensor.shape))


def _without(part: Slice) -> Slice:
    return part._replace(tensor=part.tensor.new_empty(0))


def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for a tensor: in memory, or if it is large in a file without a name."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes > STRETCH_BYTES:
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


def kinds_of(state: State) -> State:
    """The names and types of a state's tensors, without a value."""
    found = {name: parts[0].tensor for name, parts in state.tensors.items() if parts}
    return State({name: [whole(tensor.new_empty(0))] for name, tensor in found.items()}, {})
