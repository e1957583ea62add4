"""The state of a job by canonical names, and how a newcomer gets it from a peer.

A rank's state is the parts of logical tensors that it holds (`Slice`), so any plan can read what
any plan wrote. Parameters and buffers are `model.<name>`; an optimizer's tensors are
`optimizer.<parameter>.<key>` and `groups.<number>.<key>`. What is plain in it (numbers, text, the
shape of lists and dicts) stands beside them, one entry for each parameter and one for the groups,
with a mark where a tensor belongs. Attributes that a module or an optimizer keeps outside of these
are not part of the state.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.errors import RecipeError, UsageError
from shoal.numerics.optimizers import kind_of
from shoal.parallel.layout import (
    WHOLE,
    LocalLayout,
    Slice,
    copy_slices,
    slices_of,
    slices_of_run,
    whole_slice,
)
from shoal.sync.lazy_tables import ExpandedSource, compact_tables, lazy_table_names


class ShardedState(NamedTuple):
    """What a rank holds: parts of logical tensors, and what is plain, by name."""

    tensors: dict[str, list[Slice]]
    plain: dict[str, Any]
    copied: frozenset[str] = frozenset()  # tensors that stay unchanged


class StateSource(Protocol):
    """A state to take over: a peer's, or a checkpoint's."""

    @property
    def plain(self) -> Mapping[str, Any]: ...

    def __contains__(self, name: str) -> bool: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def shape(self, name: str) -> tuple[int, ...]: ...

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        """Put a logical tensor's values where a rank holds parts of it."""
        ...


def read_whole(source: StateSource, name: str) -> Tensor:
    """All of one logical tensor."""
    made = torch.empty(source.shape(name), dtype=source.dtype(name))
    source.fill(name, [whole_slice(made)])
    return made


class ParameterRun(NamedTuple):
    """What the optimizer steps on: elements of a held parameter, from `start`."""

    name: str
    shape: torch.Size  # of the held parameter
    start: int = 0

    def parts(self, tensor: Tensor, holding: LocalLayout) -> list[Slice]:
        """A tensor of the same elements as parts of the logical one; views of it."""
        if tensor.numel() == self.shape.numel():
            return slices_of(self.name, tensor.view(self.shape), holding)
        return slices_of_run(self.name, self.shape, self.start, tensor, holding)

    def row_parts(self, tensor: Tensor, holding: LocalLayout) -> list[Slice]:
        """A tensor with one number for each row: optimizers that keep such step on whole ones."""
        return [whole_slice(tensor)]


class OptimizedPart(Protocol):
    """What an optimizer steps on, in the place of a parameter or of a part of it."""

    @property
    def name(self) -> str: ...

    def parts(self, tensor: Tensor, holding: LocalLayout) -> list[Slice]: ...
    def row_parts(self, tensor: Tensor, holding: LocalLayout) -> list[Slice]: ...


class TrainState:
    """The state of a model and an optimizer, as one rank holds them.

    `tensors` are its parameters and buffers; `runs` says of each tensor that the optimizer steps
    on which elements it stands for. What `state_dict` returns are the live tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        runs: Mapping[Tensor, OptimizedPart],
        holding: LocalLayout = WHOLE,
    ):
        self.tensors, self.optimizer, self.runs, self.holding = tensors, optimizer, runs, holding

    def state_dict(self, with_runs: bool = False) -> ShardedState:
        """If `with_runs`, what the optimizer steps on is the model's too."""
        tensors = {
            f"model.{name}": slices_of(name, tensor, self.holding)
            for name, tensor in self.tensors.items()
        }
        for p, run in self.runs.items() if with_runs else ():
            parts = run.parts(p.detach(), self.holding)
            tensors.setdefault(f"model.{run.name}", []).extend(parts)
        plain: dict[str, Any] = {KIND: kind_of(self.optimizer)}
        for p, own in self.optimizer.state.items():
            if p not in self.runs:  # servers step on it
                continue
            path = f"optimizer.{self.runs[p].name}"
            plain[path] = self._put(own, path, tensors, p)
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        plain[GROUPS] = self._put(groups, GROUPS, tensors, None)
        held = {name: parts for name, parts in tensors.items() if parts}
        tables = [t for t in lazy_table_names(self.runs) if f"model.{t}" in held]
        found, copied = compact_tables(held, tables) if tables else (held, frozenset())
        return ShardedState(found, plain, copied)

    @torch.no_grad()
    def load_state_dict(self, source: StateSource) -> None:
        """Take over the state of a job of the same recipe."""
        source = ExpandedSource(source, lazy_table_names(self.runs))
        for name, tensor in self.tensors.items():
            source.fill(f"model.{name}", slices_of(name, tensor, self.holding))
        self.optimizer.state.clear()
        for p, run in self.runs.items():
            path = f"optimizer.{run.name}"
            if path in source.plain and run.name not in self.holding.absent:
                self.optimizer.state[p] = self._take(source.plain[path], path, source, p)
        self.load_groups(source)

    def load_groups(self, source: StateSource) -> None:
        """Take over the optimizer's settings: rates, decay, betas, also if a hook changed them."""
        groups = self._take(source.plain[GROUPS], GROUPS, source, None)
        self._refuse_another(source.plain[KIND], len(groups))
        for group, values in zip(self.optimizer.param_groups, groups):
            group.update(values)

    def _refuse_another(self, kind: str, num_groups: int) -> None:
        own, num_own = kind_of(self.optimizer), len(self.optimizer.param_groups)
        if (kind, num_groups) != (own, num_own):
            raise UsageError(
                f"The state is of the optimizer {kind} with {num_groups} groups of parameters, and "
                f"this is {own} with {num_own}. A state fits the optimizer that made it."
            )

    def _put(self, value: Any, path: str, tensors: dict[str, list[Slice]], p: Tensor | None) -> Any:
        """Put tensors where they belong and a mark in their place; the rest stays, if plain."""
        if isinstance(value, Tensor):
            # What is sparse is not cut as a parameter is; no checkpoint holds it.
            dense = value.layout == torch.strided
            alike = p is not None and dense and value.dim() and value.shape == p.shape
            kind, parts = TENSOR, [whole_slice(value)]
            if p is not None and alike:
                kind, parts = ALIKE, self.runs[p].parts(value, self.holding)
            elif p is not None and dense and _is_by_row(value, p):
                kind, parts = BY_ROW, self.runs[p].row_parts(value, self.holding)
            tensors.setdefault(path, []).extend(parts)
            return {kind: None}
        if isinstance(value, dict):
            return {DICT: [[k, self._put(v, f"{path}.{k}", tensors, p)] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            kind = TUPLE if isinstance(value, tuple) else LIST
            return {kind: [self._put(v, f"{path}.{i}", tensors, p) for i, v in enumerate(value)]}
        if isinstance(value, float) and not math.isfinite(value):
            return {NUMBER: str(value)}  # JSON has no word for it
        if isinstance(value, str | int | float | None):
            return value
        raise RecipeError(
            f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in {path}, which "
            "cannot be handed to another rank. An optimizer's state may hold tensors, numbers, "
            "text, and lists, tuples and dicts of them."
        )

    def _take(self, value: Any, path: str, source: StateSource, p: Tensor | None) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == TENSOR:
            made = read_whole(source, path)
            return made if p is None or not made.dim() else made.to(p.device)
        if kind == ALIKE:
            assert p is not None
            made = torch.empty_like(p, dtype=source.dtype(path), requires_grad=False)
            source.fill(path, self.runs[p].parts(made, self.holding))
            return made
        if kind == BY_ROW:
            assert p is not None
            made = p.new_empty((len(p), *source.shape(path)[1:]), dtype=source.dtype(path))
            source.fill(path, self.runs[p].row_parts(made, self.holding))
            return made
        if kind == NUMBER:
            return float(content)
        if kind == DICT:
            return {key: self._take(part, f"{path}.{key}", source, p) for key, part in content}
        parts = [self._take(part, f"{path}.{i}", source, p) for i, part in enumerate(content)]
        return tuple(parts) if kind == TUPLE else parts


class MemorySource:
    """A state as a source; that of a peer has the very parts that are wanted."""

    def __init__(self, state: ShardedState):
        self._tensors, self.plain = state.tensors, state.plain

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name][0].tensor.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0].global_shape

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        parts = self._tensors.get(name, ())
        known = {(part.offset, part.tensor.shape): part.tensor for part in parts}
        for place in places:
            same = known.get((place.offset, place.tensor.shape))
            if same is not None:
                place.tensor.copy_(same)
            elif copy_slices(parts, place):
                raise KeyError(f"{name} from {place.offset}")


FRAME_BYTES = 1 << 20  # of small tensors in one frame
GROUPS, KIND = "groups", "optimizer"
# What stands for what JSON cannot hold.
TENSOR, ALIKE, BY_ROW = "tensor", "alike", "by-row"
DICT, LIST, TUPLE, NUMBER = "dict", "list", "tuple", "number"


def _is_by_row(value: Tensor, p: Tensor) -> bool:
    """Whether a state has one number for each row of its parameter."""
    return value.dim() > 1 and value.shape == (len(p), *[1] * (p.dim() - 1))


class _SliceHeader(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def broadcast_bytes(group: Group, source: int, content: bytes) -> bytes:
    """Broadcast the bytes of rank `source`."""
    length = torch.tensor([len(content)], dtype=torch.int64)
    group.broadcast(length, source)
    payload = torch.zeros(int(length.item()), dtype=torch.uint8)
    if group.rank == source:
        payload.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    group.broadcast(payload, source)
    return payload.numpy().tobytes()


def first_problem(group: Group, own: str) -> str:
    """The problem of the first rank that has one, on every rank. Every rank must call it."""
    rows = group.all_gather_numbers([bool(own)])
    found = [rank for rank, row in enumerate(rows) if row[0]]
    return broadcast_bytes(group, found[0], own.encode()).decode() if found else ""


def pack_state(state: ShardedState) -> list[bytes | Tensor]:
    """What is plain, the names and the shapes; then the tensors, of which small ones are joined.

    A model of thousands of small parameters then fits in one message as well.
    """
    header, parts = _describe(state)
    frames: list[bytes | Tensor] = [header]
    for run in _frame_ranges([part.nbytes for part in parts]):
        own = parts[run.start : run.stop]
        frames.append(own[0] if len(own) == 1 else _concatenate(own))
    return frames


def unpack_state(frames: Sequence[memoryview]) -> ShardedState:
    """The state, from what `pack_state` made of it; a copy."""
    if not frames:
        raise ValueError("a state has one frame at least, which says what is in it")
    plain, entries = _read_header(frames[0])
    sizes = [_num_bytes(entry) for entry in entries]
    tensors: dict[str, list[Slice]] = {}
    for run, frame in zip(_frame_ranges(sizes), frames[1:], strict=True):
        payload = torch.frombuffer(bytearray(frame) or bytearray(1), dtype=torch.uint8)
        parts = payload[: len(frame)].split(sizes[run.start : run.stop])
        for entry, part in zip(entries[run.start : run.stop], parts, strict=True):
            tensors.setdefault(entry.name, []).append(_part(entry, part))
    return ShardedState(tensors, plain)


def _describe(state: ShardedState) -> tuple[bytes, list[Tensor]]:
    """What is plain, the names and the shapes as bytes; and the tensors, in that order."""
    listed = [(name, part) for name, parts in state.tensors.items() for part in parts]
    entries = [
        _SliceHeader(n, str(s.tensor.dtype).removeprefix("torch."), tuple(s.tensor.shape), *s[1:])
        for n, s in listed
    ]
    header = msgspec.msgpack.encode((state.plain, entries))
    return header, [s.tensor.detach().contiguous() for _, s in listed]


def _frame_ranges(sizes: Sequence[int]) -> Iterator[range]:
    """Which tensors share a frame, by their bytes: small neighbours do, a large one is alone."""
    most = max(FRAME_BYTES, sum(sizes) // 1_000)  # so frames are a few thousand at the most
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > most:
            yield range(start, number)
            start, total = number, 0
        total += size
    if sizes:
        yield range(start, len(sizes))


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def broadcast_state(group: Group, source: int, state: ShardedState) -> ShardedState:
    """Broadcast the state of rank `source`; the others' argument is ignored.

    One message for what is plain, the names and the shapes, one for all the bytes. Every rank must
    call it.
    """
    header, parts = _describe(state)
    header = broadcast_bytes(group, source, header)
    if group.rank == source:
        group.broadcast(_concatenate(parts).cpu(), source)
        return state
    plain, entries = _read_header(header)
    payload = torch.empty(sum(_num_bytes(e) for e in entries), dtype=torch.uint8)
    group.broadcast(payload, source)
    tensors: dict[str, list[Slice]] = {}
    for entry, part in zip(entries, payload.split([_num_bytes(e) for e in entries]), strict=True):
        tensors.setdefault(entry.name, []).append(_part(entry, part))
    return ShardedState(tensors, plain)


def _read_header(header: bytes | memoryview) -> tuple[dict[str, Any], list[_SliceHeader]]:
    return msgspec.msgpack.decode(header, type=tuple[dict[str, Any], list[_SliceHeader]])


def _num_bytes(entry: _SliceHeader) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.Size(entry.shape).numel() * dtype.itemsize


def _part(entry: _SliceHeader, payload: Tensor) -> Slice:
    # A part may start anywhere, a view wants alignment: copy.
    tensor = payload.clone().view(getattr(torch, entry.dtype)).view(entry.shape)
    return Slice(tensor, entry.global_shape, entry.offset)
