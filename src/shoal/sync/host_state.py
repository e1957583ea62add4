"""One copy of parameters and optimizer state for all ranks of a host; each updates a share.

All of it stands in one segment of shared memory: the parameters, what the optimizer keeps of them,
and each rank's gradient. When all gradients are complete, each rank adds up its share of them where
they stand, in the tree's order, and steps on it, a chunk at a time, so that a sum is used while it
is in the cache. Nothing is sent: the parameters are the others' parameters too. A rank that dies in
the middle of it tears nothing (`comm/undo_log.py`).

Bytes of each of N ranks, a parameter in fp32 and Adam: (12 + 4N)/N, and the log of a chunk. When
not to use it: over several hosts, on GPUs, or if replicas are to be compared with one another
(`memory=apart`). `why_apart` says what else it is not for.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from shoal.comm.collectives import COLLECTIVE_TIMEOUT, Group
from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from shoal.comm.tree import Block, fold
from shoal.comm.undo_log import UndoLog, words_bytes
from shoal.faults import faultpoint
from shoal.logs import warn_once
from shoal.numerics.direct_linear import DirectLinears
from shoal.numerics.fused_steps import (
    Runs,
    StepGroup,
    begin_count,
    count_of,
    step_groups,
    why_not_in_runs,
)
from shoal.numerics.reserved import ReservedParameter
from shoal.numerics.storage_address import storage_address
from shoal.parallel.layout import LocalLayout, Slice, slices_of_run
from shoal.parallel.zero_layout import FlatBuffer, lay_out_buffers
from shoal.sync.digests import NamedTensor
from shoal.sync.state import broadcast_bytes

CHUNK = 1 << 17  # elements that are added up and stepped on at a time
_ITEM = 4  # bytes of an element
_PAGE = 4096
Sum = int | tuple["Sum", "Sum"]  # a row of the memory, or what to add


class MemoryLayout(NamedTuple):
    """Where everything stands, in elements from the first row on. Pure."""

    buffers: list[FlatBuffer]
    offsets: list[int]  # of the buffers in a row
    length: int  # of a row
    num_slots: int  # tensors of optimizer state of a parameter
    blocks: Sequence[Sequence[Block]]  # of the pieces of each rank: a row of gradients for each

    @classmethod
    def of(
        cls, lengths: Sequence[int], num_slots: int, blocks: Sequence[Sequence[Block]]
    ) -> "MemoryLayout":
        buffers = lay_out_buffers([(n, _ITEM, None) for n in lengths], len(blocks), may_cut=True)
        *offsets, length = accumulate((buffer.starts[-1] for buffer in buffers), initial=0)
        return cls(buffers, offsets, length, num_slots, blocks)

    @property
    def num_ranks(self) -> int:
        return len(self.blocks)

    def first_gradient(self, rank: int) -> int:
        """The row of a rank's first block; rows before are parameters and state."""
        return 1 + self.num_slots + sum(map(len, self.blocks[:rank]))

    @property
    def num_rows(self) -> int:
        return self.first_gradient(self.num_ranks)

    @property
    def log_length(self) -> int:
        """Of one rank's log: the parameters of a chunk, and their state."""
        return (1 + self.num_slots) * CHUNK

    @property
    def head_bytes(self) -> int:
        return -(-words_bytes(self.num_ranks) // _PAGE) * _PAGE

    @property
    def num_bytes(self) -> int:
        count = self.num_rows * self.length + self.num_ranks * self.log_length
        return self.head_bytes + _ITEM * count

    def sum(self) -> Sum:
        """The rows of gradients, in the order in which they are added."""
        rows: dict[Block, Sum] = {}
        for rank, blocks in enumerate(self.blocks):
            first = self.first_gradient(rank)
            rows |= {block: first + number for number, block in enumerate(blocks)}
        return fold(rows, sum(block.num_pieces for block in rows), lambda a, b: (a, b))

    def segments(self, rank: int) -> Iterator["OwnedRun"]:
        """What a rank owns of each parameter."""
        for buffer, offset in zip(self.buffers, self.offsets, strict=True):
            for s in buffer.segments(rank):
                yield OwnedRun(s.parameter, s.start, offset + s.place, s.length)

    def chunks(self, rank: int) -> list["HeldChunk"]:
        """Each buffer's share of a rank, cut at multiples of the alignment."""
        made = []
        owned = list(self.segments(rank))
        for buffer, offset in zip(self.buffers, self.offsets, strict=True):
            first, last = (offset + cut for cut in buffer.cuts[rank : rank + 2])
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                made.append(HeldChunk(start, stop, [s for s in owned if s.overlaps(start, stop)]))
        return made


class OwnedRun(NamedTuple):
    """Elements of one parameter that one rank owns."""

    parameter: int
    start: int  # in it
    place: int  # in a row
    length: int

    def overlaps(self, start: int, stop: int) -> bool:
        return self.place < stop and start < self.place + self.length


class HeldChunk(NamedTuple):
    """What is stepped on together: from `start` to `stop` in a row."""

    start: int
    stop: int
    segments: list[OwnedRun]  # that reach into it

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Each parameter, and its elements in the row."""
        for s in self.segments:
            yield s.parameter, slice(max(s.place, self.start), min(s.place + s.length, self.stop))


def why_apart(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why ranks of a host cannot share these parameters and their state, in words; or ""."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for name, p in trained:
        if type(p) is not nn.Parameter or isinstance(p, ReservedParameter):
            return f"{name} is a {type(p).__name__}"
        if p.dtype != torch.float32 or p.device.type != "cpu" or not p.is_contiguous():
            return f"{name} is not of float32 and contiguous on the CPU"
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for _, p in trained if p.numel())
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        return "parameters are views of one another"
    trained_in = {storage_address(p) for _, p in trained if p.numel()}
    for name, other in (*model.named_parameters(), *model.named_buffers()):
        is_view = other.numel() and storage_address(other) in trained_in
        if is_view and not other.requires_grad:
            return f"{name} is a view of a parameter that is trained"
    return why_not_in_runs(optimizer)


class HostState:
    """One rank's view of the memory. Order of calls: `settle`, when all hold the same; then for
    each step `add_up`, if sums are wanted before it, and `step`. Every rank calls them."""

    def __init__(
        self,
        segment: SharedSegment,
        layout: MemoryLayout,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, nn.Parameter],
    ):
        self.layout, self._group, self._optimizer = layout, group, optimizer
        self._named, groups = list(named.items()), step_groups(optimizer)
        floats = segment.bytes[layout.head_bytes :].view(torch.float32)
        self.rows = [floats[k * layout.length :][: layout.length] for k in range(layout.num_rows)]
        logs = floats[layout.num_rows * layout.length :]
        self.logs = [
            logs[r * layout.log_length :][: layout.log_length].view(-1, CHUNK)
            for r in range(layout.num_ranks)
        ]
        timeout_s = COLLECTIVE_TIMEOUT.total_seconds()
        self._log = UndoLog(segment, group.rank, layout.num_ranks, timeout_s, group.is_lost)
        self._places = {
            i: offset + start
            for buffer, offset in zip(layout.buffers, layout.offsets, strict=True)
            for i, start in zip(buffer.indices, buffer.starts, strict=False)
        }
        self.groups = [groups.get(p) for _, p in self._named]
        self._segments = list(layout.segments(group.rank))
        self._update = _Update(self)
        self._kept: Tensor | None = None
        row = layout.first_gradient(group.rank + 1) - 1  # of this rank's last piece
        wanted: dict[Tensor, Tensor] = {
            p: self._view(row, i) for i, (_, p) in enumerate(self._named)
        }
        self.linears = DirectLinears(model, wanted)

    @classmethod
    def make(
        cls,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, nn.Parameter],
        blocks: Sequence[Sequence[Block]],
    ) -> "HostState | None":
        """None if the memory cannot be had. Every rank must call it, and gets the same answer."""
        groups = step_groups(optimizer)
        num_slots = max((len(groups[p].keys) for p in named.values() if p in groups), default=0)
        layout = MemoryLayout.of([p.numel() for p in named.values()], num_slots, blocks)
        segment = _share(group, layout.num_bytes) if layout.length else None
        return None if segment is None else cls(segment, layout, group, model, optimizer, named)

    # ---- where things stand

    @property
    def names(self) -> set[str]:
        """Of the parameters."""
        return {name for name, _ in self._named}

    def gradient_rows(self, number: int) -> list[Tensor]:
        """This rank's part of the memory for the gradients of a buffer, by block."""
        first = self.layout.first_gradient(self._group.rank)
        count, offset = len(self.layout.blocks[self._group.rank]), self.layout.offsets[number]
        length = self.layout.buffers[number].starts[-1]
        return [self.rows[first + k][offset : offset + length] for k in range(count)]

    @property
    def has_gradients(self) -> bool:
        """Whether the gradient of the last update was kept."""
        return self._kept is not None

    def own_gradients(self) -> list[Tensor]:
        """Of this rank's elements, by segment: their sum, once `add_up` was called; after an update
        that keeps the gradient, as it was stepped on."""
        row = self.rows[self.layout.first_gradient(self._group.rank)]
        row = row if self._kept is None else self._kept
        return [row[s.place : s.place + s.length] for s in self._segments]

    def gradients(self, holding: LocalLayout) -> dict[str, list[Slice]]:
        """The same by name, without parameters that no piece touched."""
        found: dict[str, list[Slice]] = {}
        for s, gradient in zip(self._segments, self.own_gradients(), strict=True):
            if self._touched[s.parameter]:
                name, p = self._named[s.parameter]
                parts = slices_of_run(name, p.shape, s.start, gradient, holding)
                found.setdefault(name, []).extend(parts)
        return found

    def own_segments(self) -> list[tuple[str, OwnedRun]]:
        return [(self._named[s.parameter][0], s) for s in self._segments]

    def own_parameters(self) -> Iterator[NamedTensor]:
        """What this rank alone writes of the parameters."""
        for name, s in self.own_segments():
            yield self._own(0, s), ("model", name)

    def own_state(self) -> Iterator[NamedTensor]:
        """And of the optimizer's state."""
        for name, s in self.own_segments():
            for slot, key in enumerate(self._keys(s.parameter)):
                yield self._own(1 + slot, s), ("optimizer", name, key)

    def counts(self) -> Iterator[NamedTensor]:
        """Of steps: each rank keeps its own, and all are alike."""
        for group, (name, p) in zip(self.groups, self._named, strict=True):
            state = self._optimizer.state.get(p)
            if group is not None and group.counts and state:
                yield count_of(state), ("optimizer", name, "step")

    def _keys(self, number: int) -> tuple[str, ...]:
        """Of a parameter's state."""
        group = self.groups[number]
        return () if group is None else group.keys

    def _own(self, row: int, segment: OwnedRun) -> Tensor:
        """Without the versions of the memory, to which everything here writes."""
        return self.rows[row][segment.place : segment.place + segment.length].data

    def _view(self, row: int, number: int) -> Tensor:
        """Of a whole parameter. Optimizer state takes its `data`: a save that finds the version of
        a tensor changed refuses it, and gradients are written to the same memory."""
        p, place = self._named[number][1], self._places[number]
        return self.rows[row][place : place + p.numel()].view(p.shape)

    # ---- what is done

    @torch.no_grad()
    def settle(self) -> None:
        """Let parameters and state, which all ranks hold alike, stand here. Every rank calls it."""
        self._log.begin()
        for s in self._segments:
            p = self._named[s.parameter][1]
            state, keys = self._optimizer.state.get(p, {}), self._keys(s.parameter)
            for row, value in enumerate([p.detach(), *(state.get(key) for key in keys)]):
                place = self.rows[row][s.place : s.place + s.length]
                if value is None:
                    place.zero_()
                else:
                    place.copy_(value.reshape(-1)[s.start : s.start + s.length])
        sent = self._group.bytes_sent
        self._group.all_gather_numbers([True])
        self._group.bytes_sent = sent  # a start is not counted
        for i, (_, p) in enumerate(self._named):
            p.data = self._view(0, i)
            state = self._optimizer.state.get(p, {})
            for slot, key in enumerate(self._keys(i)):
                if state.get(key) is not None:
                    state[key] = self._view(1 + slot, i).data

    @torch.no_grad()
    def give_back(self) -> None:
        """Let parameters and state stand in this rank's own memory again."""
        for i, (_, p) in enumerate(self._named):
            p.data = p.data.clone()
            state = self._optimizer.state.get(p, {})
            for key in self._keys(i):
                if state.get(key) is not None:
                    state[key] = state[key].clone()

    def leave(self) -> None:
        """The group is left; what others do here waits for this rank no longer."""
        self.linears.close()
        self._log.leave()

    def begin(self) -> None:
        """A step begins, perhaps again."""
        self.linears.begin()
        self._update.is_added, self._kept = False, None

    def agreed(self, touched: Sequence[bool]) -> None:
        """All know which parameters any piece touched; no other is stepped on."""
        self._touched = touched

    @torch.no_grad()
    def add_up(self) -> None:
        """Put the sum of this rank's elements in the place of its own gradient."""
        self._update.add_up(self._group.rank)

    @torch.no_grad()
    def step(self, scale: float, keeps: bool) -> None:
        """Scale the gradient and step. If it `keeps` the gradient, `own_gradients` are of it
        afterwards."""
        kept = torch.zeros(self.layout.length) if keeps else None
        self._update.prepare(scale, self._touched, kept)
        self._log.update(self._update)
        self._update.end()
        self._kept = kept
        increment_version([p for _, p in self._named])

    def begin_state(self, touched: Sequence[bool]) -> "tuple[list[Tensor | None], list[bool]]":
        """Count the step of each parameter that is touched; which of them had no momentum yet."""
        counts: list[Tensor | None] = [None] * len(self._named)
        is_first = [False] * len(self._named)
        for i, (_, p) in enumerate(self._named):
            group = self.groups[i]
            if group is None or not group.keys or not touched[i]:
                continue
            state = self._optimizer.state[p]
            missing = [key for key in group.keys if state.get(key) is None]
            if group.counts:
                if missing:
                    begin_count(state)
                counts[i] = count_of(state)
            is_first[i] = bool(missing) and not group.counts
            for slot, key in enumerate(group.keys):
                if key in missing:
                    state[key] = self._view(1 + slot, i).data
        if counted := [count for count in counts if count is not None]:
            torch._foreach_add_(counted, 1)
        return counts, is_first


class _Elements(NamedTuple):
    """Those of one parameter in a chunk."""

    parameter: int
    values: Tensor
    gradient: Tensor
    state: list[Tensor]


class _Views:
    """A chunk of each row of the memory, and where its sum is made."""

    def __init__(self, chunk: HeldChunk, held: "HostState", log: Tensor, scratch: Sequence[Tensor]):
        place, length = slice(chunk.start, chunk.stop), chunk.stop - chunk.start
        self.place = place
        self.rows = [row[place] for row in held.rows]
        self.log = [row[:length] for row in log]
        self.scratch = [row[:length] for row in scratch]
        self.gradient = self.scratch[0]
        self.elements = [
            _Elements(
                number,
                held.rows[0][at],
                self.gradient[at.start - chunk.start : at.stop - chunk.start],
                [row[at] for row in held.rows[1 : 1 + held.layout.num_slots]],
            )
            for number, at in chunk.runs()
        ]

    def add(self, what: Sum, level: int = 0) -> Tensor:
        if isinstance(what, int):
            return self.rows[what]
        left, right = self.add(what[0], level), self.add(what[1], level + 1)
        return torch.add(left, right, out=self.scratch[level])


class _Update:
    """An update, chunk by chunk: of this rank's share, or in the stead of one that died.

    The gradients stay what they are until the end of it, so that a chunk can be done again.
    """

    def __init__(self, held: HostState):
        self._held: HostState = weakref.proxy(held)  # which holds this: the memory goes with it
        self._sum = held.layout.sum()
        self._views: dict[int, list[_Views]] = {}  # by rank
        self._scratch = [torch.empty(CHUNK) for _ in range(max(1, _depth(self._sum)))]
        self._kept: Tensor | None = None  # the gradient that was stepped on
        self.is_added = False
        self._number = 0  # of updates in this group, for faults

    def prepare(self, scale: float, touched: Sequence[bool], kept: Tensor | None) -> None:
        self._scale, self._touched, self._kept = scale, touched, kept

    def end(self) -> None:
        self._number += 1

    def add_up(self, rank: int) -> None:
        if self.is_added:
            return
        own = self._held.layout.first_gradient(rank)
        for views in self._of(rank):
            views.rows[own].copy_(views.add(self._sum))
        self.is_added = True

    # ---- what `UndoLog` asks for

    def begin(self) -> None:
        self._counts, self._is_first = self._held.begin_state(self._touched)

    def count(self, rank: int) -> int:
        return len(self._of(rank))

    def log(self, rank: int, number: int) -> None:
        views = self._of(rank)[number]
        for row, log in zip(views.rows, views.log, strict=False):
            log.copy_(row)

    def put_back(self, rank: int, number: int) -> None:
        views = self._of(rank)[number]
        for row, log in zip(views.rows, views.log, strict=False):
            row.copy_(log)

    def change(self, rank: int, number: int) -> None:
        views, own = self._of(rank)[number], self._held.layout.first_gradient(rank)
        found, gradient = views.add(own if self.is_added else self._sum), views.gradient
        if self._scale != 1.0:
            torch.mul(found, self._scale, out=gradient)
        elif found is not gradient:
            gradient.copy_(found)
        for group, is_first, runs in self._runs(views):
            faultpoint("update.logged", self._number)
            group.step(runs, is_first)
        faultpoint("update.torn", self._number)
        if self._kept is not None:
            self._kept[views.place] = gradient

    def _runs(self, views: _Views) -> Iterable[tuple[StepGroup, bool, Runs]]:
        """What is stepped on together: of one group, with momentum or yet without."""
        found: dict[tuple[int, bool], tuple[StepGroup, bool, Runs]] = {}
        for i, values, gradient, state in views.elements:
            group, is_first, count = self._held.groups[i], self._is_first[i], self._counts[i]
            if group is None or not self._touched[i]:
                continue
            key = id(group.group), is_first
            if key not in found:
                found[key] = group, is_first, Runs([], [], [[] for _ in group.keys], [])
            *_, runs = found[key]
            runs.parameters.append(values)
            runs.gradients.append(gradient)
            for kept, own in zip(runs.state, state, strict=False):
                kept.append(own)
            if count is not None:
                runs.counts.append(count)
        return found.values()

    def _of(self, rank: int) -> list[_Views]:
        if rank not in self._views:
            held, log = self._held, self._held.logs[rank]
            chunks = held.layout.chunks(rank)
            self._views[rank] = [_Views(chunk, held, log, self._scratch) for chunk in chunks]
        return self._views[rank]


def _depth(what: Sum) -> int:
    """Scratch rows that a sum needs."""
    return 0 if isinstance(what, int) else max(_depth(what[0]), 1 + _depth(what[1]))


def _share(group: Group, num_bytes: int) -> SharedSegment | None:
    """Memory that all ranks of the group have, or none."""
    segment, why, place = None, "", b""
    if group.rank == 0:
        try:
            faultpoint("host_state.share")
            segment = SharedSegment.create(num_bytes)
            place = msgspec.json.encode(segment.place)
        except (NotShared, OSError) as error:
            why = str(error)
    place = broadcast_bytes(group, 0, place or b" ")
    if group.rank and place.strip():
        try:
            handle = msgspec.json.decode(place, type=SegmentHandle)
            segment = SharedSegment.open(handle, num_bytes + _PAGE)
        except (NotShared, msgspec.MsgspecError) as error:
            why = str(error)
    have_it = all(row[0] for row in group.all_gather_numbers([segment is not None]))
    if why:
        warn_once(f"Ranks of one host hold parameters of their own: {why}")
    return segment if have_it else None
