"""A server's part of the job: the parameters it answers for, and the optimizer that steps on them.

The parameters stand in memory that workers of the same host may read (`parameter_buffers.py`). The
optimizer is the recipe's own, stepping on runs of the parameters as it does under ZeRO; learning
rates, and what hooks and schedules of the workers have changed of its settings, come with every
step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import RecipeError
from shoal.numerics.norms import block_norms, values_of
from shoal.numerics.optimizers import (
    ParameterPart,
    begin_momentum,
    is_element_wise,
    stepper,
    swap_parameters,
)
from shoal.numerics.reserved import ReservedParameter, clear_rows, touched_rows
from shoal.numerics.threads import ComputeThreads
from shoal.parallel.layout import WHOLE, LocalLayout, Slice
from shoal.parallel.striping import tables_of, weights_of
from shoal.sync.digests import CachedListing, NamedTensor
from shoal.sync.guard import CorruptState, Guard, corruption_message, find_address, tensors_in
from shoal.sync.lazy_tables import ExpandedSource, compact_tables, lazy_table_names
from shoal.sync.server.layout import ServerLayout, make_layout
from shoal.sync.server.messages import DumpState
from shoal.sync.server.parameter_buffers import ParameterBuffers
from shoal.sync.server.tables import ServerTables
from shoal.sync.state import (
    MemorySource,
    OptimizedPart,
    ParameterRun,
    ShardedState,
    StateSource,
    TrainState,
)
from shoal.sync.state_chunks import allocate_spillable

Settings = list[dict[str, Any]]
WORTH_A_CREW = 4 << 20  # bytes of gradients
GRAIN = 1 << 15  # elements that torch gives to one thread at least


def served_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that servers hold, but for tables (`tables.py`)."""
    rest = weights_of(tables_of(model).values())
    named = model.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and p.numel() and p not in rest]


def layout_of(model: nn.Module, optimizer: torch.optim.Optimizer, num_servers: int) -> ServerLayout:
    sizes = [(p.numel(), p.itemsize, p.dtype) for _, p in served_parameters(model)]
    tables = weights_of(tables_of(model).values())
    return make_layout(sizes, is_element_wise(optimizer, tables), num_servers)


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """What a step depends on beside its parameters: rates, decay, betas."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names") and _is_plain(value)
        }
        for group in optimizer.param_groups
    ]


class ChangedSettings:
    """The settings that a worker's hooks and schedules have ever changed, and learning rates.

    The others are the optimizer's own, which may count in them as it steps on the server. What
    workers change at different times must `always` be said: a server keeps what another said last.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, always: Iterable[str] = ("lr",)):
        self._first = settings_of(optimizer)
        self._names = [set(always) & first.keys() for first in self._first]

    def of(self, optimizer: torch.optim.Optimizer) -> Settings:
        found = settings_of(optimizer)
        for names, first, now in zip(self._names, self._first, found, strict=True):
            names |= {name for name, value in now.items() if value != first.get(name)}
        return [
            {name: now[name] for name in sorted(names) if name in now}
            for names, now in zip(self._names, found, strict=True)
        ]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | str | None)


class ShardDigests(NamedTuple):
    """Which slice of the state was looked at after a step, and what its tensors' digests are."""

    turn: int
    digests: list[int]


class ServerShard:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: ServerLayout,
        number: int,
        tables: ServerTables | None = None,
        shared: bool = True,
        check_every: int = 0,
        holding: LocalLayout = WHOLE,
    ):
        """What server `number` steps on, of a part of the model if `holding` says so; a copy that
        no worker reads need not be shared. With `check_every` it is guarded from one step to the
        next, all of it in so many."""
        self.layout, self.optimizer, self.number = layout, optimizer, number
        self._holding = holding
        self._guard, self._num_steps = Guard(check_every, follows=True), 0
        self._listing = CachedListing()
        self.tables = ServerTables(nn.Module(), number, 1) if tables is None else tables
        self.tables.number_from(len(layout.keys))
        self.keys = layout.held_by(number)
        self._named = served_parameters(model)
        dtypes = {key: self._dtype_of(key) for key in self.keys}
        self.sets = ParameterBuffers(layout, number, dtypes, shared)
        self._scaled: dict[int, Tensor] = {}  # gradients of the last step, made when needed
        self._views: dict[int, list[Tensor]] = {}  # by set, what each run is there
        self._swap_optimizer()
        self._step = stepper(optimizer)
        self._alone = self._crew = ComputeThreads()  # who steps on little, and on much

    @property
    def values(self) -> dict[int, Tensor]:
        """The parameters of now, by key."""
        return self.sets.values

    def _dtype_of(self, key: int) -> torch.dtype:
        first = self.layout.flat_buffers[self.layout.keys[key].flat_buffer].indices[0]
        return self._named[first][1].dtype

    def _swap_optimizer(self) -> None:
        """Let the optimizer step on this server's runs instead of the parameters."""
        self.runs: dict[Tensor, OptimizedPart] = dict(self.tables.runs)
        self._places: dict[Tensor, tuple[int, int, slice]] = {}
        parts: dict[nn.Parameter, list[ParameterPart]] = {p: [] for _, p in self._named}
        for key in self.keys:
            for number, segment in enumerate(self.layout.segments(key)):
                name, p = self._named[segment.parameter]
                where = slice(segment.place, segment.place + segment.length)
                shape = p.shape if segment.length == p.numel() else (segment.length,)
                self.values[key][where].copy_(p.detach().reshape(-1)[segment.start : segment.stop])
                run = nn.Parameter(self.values[key][where].view(shape))
                self.runs[run] = ParameterRun(name, p.shape, segment.start)
                self._places[run] = key, number, where
                parts[p].append(ParameterPart(run, partial(_take, segment.start, shape)))
        swap_parameters(self.optimizer, parts.get)

    def key_of(self, run: Tensor) -> int:
        """The key that a run of elements is of."""
        return self._places[run][0]

    def norms(self, sums: Mapping[int, Tensor]) -> Tensor:
        """Of the blocks of these gradients."""
        dense = [
            sums[key][s.place : s.place + s.length]
            for key in self.keys
            for s in self.layout.segments(key)
        ]
        return block_norms([*dense, *(sums[key] for key in self.tables.keys)])

    def apply(
        self,
        sums: Mapping[int, Tensor],
        touched: Mapping[int, Sequence[bool]],
        scale: float,
        factor: float,
        settings: Settings,
        turn: int | None = None,
    ) -> "ShardDigests":
        """Step on gradients, of which those that no piece touched do not exist.

        Another that did so looked at the slice of the state whose `turn` it was.
        """
        if len(self.sets.sets) > 1:
            self.check_digests()  # where workers read
        self._set(settings, factor)
        self._turn()
        self.check_digests()  # where the step begins
        gradients = sums if self._takes_as_they_are(scale) else self._scale(sums, scale)
        for run, (key, number, where) in self._places.items():
            is_there = key in sums and touched[key][number]
            run.grad = gradients[key][where].view(run.shape) if is_there else None
        if any(run.grad is not None and run not in self.optimizer.state for run in self._places):
            begin_momentum(self.optimizer)  # of what was frozen so far
        before = settings_of(self.optimizer)

        def step() -> None:
            self.tables.take_gradients(sums, touched, scale)
            self._step()

        self._crew_for(sums).do(step)
        self._check_changes(settings, before)
        self._set(settings, 1.0)  # what a checkpoint tells is the rate of the whole batch
        turn = self._num_steps + 1 if turn is None else turn
        self._num_steps = turn
        values = [value for own in self.optimizer.state.values() for value in own.values()]
        return ShardDigests(turn, self._guard.note(self._listing.of(values, self._held), turn))

    def check_digests(self) -> None:
        """Raises CorruptState if what was noted after the last step is not as it was."""
        if names := self._guard.changed():
            when = f" after update {self._num_steps}"
            raise CorruptState(corruption_message(f"server {self.number}", names, when))

    def noted(self) -> list[str]:
        """The tensors that were looked at after the last step, in the order of their digests."""
        return self._guard.names()

    def _held(self) -> list[NamedTensor]:
        """Parameters, and what the optimizer keeps of them; of lazy tables nothing."""
        runs = {
            run: own.name
            for run, own in self.runs.items()
            if not isinstance(run, ReservedParameter)
        }
        weights: list[NamedTensor] = [(run, ("model", name)) for run, name in runs.items()]
        state = self.optimizer.state  # which may be in another order after it was loaded
        kept = (tensors_in(state[p], ("optimizer", name)) for p, name in runs.items() if p in state)
        return [*weights, *chain.from_iterable(kept)]

    def place_of(self, what: str) -> tuple[int, int, int] | None:
        """For tests that corrupt it."""
        whose = f"server-{self.number}"
        return find_address(((tensor, (whose, *name)) for tensor, name in self._held()), what)

    def _crew_for(self, sums: Mapping[int, Tensor]) -> ComputeThreads:
        """The crew, or this thread alone where it is done before another one is awake."""
        num_bytes = sum(values_of(total).nbytes for total in sums.values())
        return self._crew if num_bytes >= WORTH_A_CREW else self._alone

    def _check_changes(self, settings: Settings, before: Settings) -> None:
        """What workers say of an optimizer, it cannot say itself."""
        for own, was, now in zip(settings, before, settings_of(self.optimizer), strict=True):
            for name in own:
                if was.get(name) != now.get(name):
                    kind = type(self.optimizer).__name__
                    raise RecipeError(
                        f"The step of {kind} changes {name}, and under sync=server workers say "
                        "what it is on every step, so the change would be lost. Use the Run's "
                        "schedule for rates, or a plan without servers."
                    )

    def _turn(self) -> None:
        """With two sets of values, step on the other one."""
        self.sets.swap()
        if len(self.sets.sets) > 1:
            if self.sets.now not in self._views:
                self._views[self.sets.now] = [
                    self.values[key][where].view(run.shape)
                    for run, (key, _, where) in self._places.items()
                ]
            for run, view in zip(self._places, self._views[self.sets.now], strict=True):
                run.data = view

    def step_with(self, crew: ComputeThreads) -> None:
        """Let several threads step from now on, if that leaves the bits as they are.

        Fused kernels share elements out in whole vectors, and rows of tables are each one thread's;
        in other kernels an element at the end of a share may be rounded otherwise.
        """
        is_fused = all(g.get("fused") is True for g in self.optimizer.param_groups)
        is_small = all(run.numel() < GRAIN for run in self._places)
        if is_fused or (is_small and is_element_wise(self.optimizer)):
            self._crew = crew

    def _takes_as_they_are(self, scale: float) -> bool:
        """Whether a step can read the sums where they stand, which saves a pass over memory.

        Fused kernels leave gradients alone; others may change them, and sums are written down
        after the step and may stand in a worker's memory.
        """
        return scale == 1.0 and all(g.get("fused") is True for g in self.optimizer.param_groups)

    def _scale(self, sums: Mapping[int, Tensor], scale: float) -> dict[int, Tensor]:
        for key in self.keys:
            gradient = sums[key]
            if key not in self._scaled:
                self._scaled[key] = torch.empty_like(gradient)
            torch.mul(gradient, scale, out=self._scaled[key])
        return self._scaled

    def check_settings(self, settings: Settings) -> None:
        """ValueError if these are not the optimizer's kind of settings. Nothing is changed."""
        groups = self.optimizer.param_groups
        if len(settings) != len(groups):
            raise ValueError(
                f"settings came for {len(settings)} groups, and there are {len(groups)}"
            )
        for group, values in zip(groups, settings, strict=True):
            for name, value in values.items():
                if name == "params" or not _is_alike(value, group.get(name)):
                    raise ValueError(f"{name} of the optimizer cannot be set to {value!r}")

    def _set(self, settings: Settings, factor: float) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            for name, value in values.items():
                old = group.get(name)
                if name == "lr":
                    value *= factor
                if isinstance(old, Tensor):
                    old.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(old, tuple) else value

    @torch.no_grad()
    def take_over(self, sent: ShardedState) -> None:
        """A state that another sent, as a whole or, with a ValueError, not at all."""
        slabs = self.tables.slabs
        dense = (*self.values.values(), *(s for s in slabs if not isinstance(s, ReservedParameter)))
        values = [
            (value, allocate_spillable(value.shape, value.dtype).copy_(value)) for value in dense
        ]
        held = [(s, touched_rows([s])) for s in slabs if isinstance(s, ReservedParameter)]
        lazy = [(slab, places, slab[places]) for slab, places in held]
        state = dict(self.optimizer.state)
        groups = [dict(group) for group in self.optimizer.param_groups]
        try:
            self.load_state_dict(MemorySource(sent))
        except Exception as error:  # it may be wrong in any way
            for own, value in values:
                own.copy_(value)
            for slab, places, rows in lazy:
                clear_rows(slab)
                slab[places] = rows
            self.sets.mark_replaced()
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            for group, old in zip(self.optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(old)
            raise ValueError(f"a state came that does not fit: {error}") from error

    def state_dict(self) -> ShardedState:
        self.check_digests()
        return self._state().state_dict(with_runs=True)

    def _state(self) -> TrainState:
        return TrainState({}, self.optimizer, self.runs, self._holding)

    def dump(self, dump: DumpState) -> ShardedState:
        """All; or the gradients of the last step; or the rows of tables alone."""
        if dump.gradients:
            return self.gradient_state()
        return self.table_state(dump.dense) if dump.tables else self.state_dict()

    def gradient_state(self) -> ShardedState:
        """The gradients of the last step, in the form of a state, until the next ones come."""
        tensors: dict[str, list[Slice]] = {}
        present = {run: run.grad.to_dense() for run in self.runs if run.grad is not None}
        for name, part in self._parts(present):
            tensors.setdefault(name, []).append(part)
        return ShardedState(tensors, {})

    def table_state(self, dense: bool) -> ShardedState:
        """The rows of tables alone; of lazy ones the touched ones, unless it is to be `dense`."""
        parts = self._parts({slab: slab.detach() for slab in self.tables.slabs})
        tensors: dict[str, list[Slice]] = {}
        for name, part in parts:
            tensors.setdefault(name, []).append(part)
        return ShardedState(tensors if dense else compact_tables(tensors, self._lazy).tensors, {})

    @property
    def _lazy(self) -> list[str]:
        """Tables of which this server holds rows, and only those that were touched."""
        return lazy_table_names({slab: run for slab, run in self.tables.runs.items() if len(slab)})

    @torch.no_grad()
    def load_state_dict(self, source: StateSource) -> None:
        self.tables.forget()
        self._guard.forget()
        source = ExpandedSource(source, self._lazy)
        for run, own in self.runs.items():
            source.fill(f"model.{own.name}", own.parts(run, self._holding))
        self.sets.mark_replaced()
        self._state().load_state_dict(source)

    def _parts(self, tensors: Mapping[Tensor, Tensor]) -> Iterable[tuple[str, Slice]]:
        for run, tensor in tensors.items():
            for part in self.runs[run].parts(tensor, self._holding):
                yield self.runs[run].name, part


def _is_alike(value: Any, own: Any) -> bool:
    """Whether a value that came is of the kind of one's own, and a number that can be used."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, list):
        many = [None] * len(value) if own is None else own
        is_fit = isinstance(many, tuple | list) and len(many) == len(value)
        return is_fit and all(map(_is_alike, value, many))
    if own is None:  # open here, or not known here
        return isinstance(value, bool | int | float | str | None) and is_finite
    if isinstance(own, bool):
        return isinstance(value, bool | None)
    if isinstance(own, Tensor):
        most = torch.finfo(own.dtype).max if own.is_floating_point() else 2**31 - 1
        return own.numel() == 1 and isinstance(value, int | float) and -most <= value <= most
    if isinstance(own, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (is_finite or value == own)
    return isinstance(value, type(own))


def _take(start: int, shape: Sequence[int], tensor: Tensor) -> Tensor:
    length = torch.Size(shape).numel()
    return tensor.reshape(-1)[start : start + length].view(shape)
