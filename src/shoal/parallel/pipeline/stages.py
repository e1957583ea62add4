"""Stages: the recorded forward of a model, and which rank runs which part of it.

`record` runs the model on two examples and records its forward as a tape. It opens large
modules, so that they can be cut, and leaves closed whatever takes another path for other data; a
module that no cut falls into is closed again, which makes the stages cheap to run.

Not for models whose top level depends on data; they are refused with the name of the operation.
Cost: a handful of forwards on one microbatch, once for each form of input.
Read next: `cuts.py` for where a tape is cut, `stage_runner.py` for how a stage runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.pipeline.calls import CallInterceptor
from shoal.parallel.pipeline.cuts import StagePlan, StageSpec, recut, split_stages
from shoal.parallel.pipeline.recorder import CannotRecord, MustBeEvent, record_forward
from shoal.parallel.pipeline.tape import Event, PlainLeaf, Tape, ValueLeaf, units_of

__all__ = [
    "StagePlan", "StageSpec", "Tape", "rank_of_stage", "record", "recut", "split_stages"
]  # fmt: skip

_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


def record(
    model: nn.Module,
    forwards: Sequence[Callable[[], Any]],
    num_stages: int,
    seeds: PieceSeeds | None = None,
    like: Tape | None = None,
    rank_of: Callable[[int], int] = lambda stage: stage,
) -> Tape:
    """Record what a forward does; each of `forwards` runs the model once, on data of its own.

    `like` is an earlier tape of the same model: the same modules are opened; `rank_of` is for
    `split_stages`. The model, its buffers and the random state are left as found.
    """
    interceptor = CallInterceptor(model)
    try:
        with _untouched(model, seeds):
            if like is not None:
                return _record_like(interceptor, forwards, like)
            return _Recording(interceptor, forwards, num_stages, seeds, rank_of).run()
    finally:
        interceptor.close()


def rank_of_stage(stage: int, num_ranks: int, schedule: str) -> int:
    """In a loop over the ranks; zbv goes there and back."""
    if schedule == "zbv" and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


class _Recording:
    """Opens and closes modules until two forwards agree on every event."""

    def __init__(
        self,
        interceptor: CallInterceptor,
        forwards: Sequence[Callable[[], Any]],
        num_stages: int,
        seeds: PieceSeeds | None,
        rank_of: Callable[[int], int],
    ):
        self.rank_of = rank_of
        self.interceptor, self.forwards, self.num_stages, self.seeds = (
            interceptor,
            forwards,
            num_stages,
            seeds,
        )
        self.closed: set[str] = set()
        self.drawing: frozenset[str] = frozenset()

    def run(self) -> Tape:
        tape = self._record_open(_open_at_first(self.interceptor.model, self.num_stages))
        while larger := self._too_large(tape):
            tape = self._record_open(tape.open | larger)
        try:
            plan = split_stages(tape, self.num_stages, self.rank_of)
        except PlanError:
            return tape  # `split_stages` will raise the error again
        needed = _open_across(plan)
        return tape if needed == tape.open else self._record_open(needed)

    def _record_open(self, wanted: frozenset[str]) -> Tape:
        while True:
            opened = _without(wanted, self.closed)
            try:
                return _agree(self.interceptor, self.forwards, opened, self.drawing, self.seeds)
            except MustBeEvent as draws:
                self.drawing |= {draws.name}
            except CannotRecord as unclear:
                if not unclear.where:
                    raise PlanError(_refusal(self.interceptor.model, unclear.reason)) from None
                self.closed.add(unclear.where)

    def _too_large(self, tape: Tape) -> frozenset[str]:
        """Units that cost so much that stages could not be balanced, and can be opened."""
        total = sum(event.cost for event in tape.events)
        units = units_of(self.interceptor.model, tape.open)
        return frozenset(
            event.name
            for event in tape.events
            if event.name in units
            and event.cost > total / (2 * self.num_stages)
            and event.name not in self.closed
            and _can_open(self.interceptor.model.get_submodule(event.name))
        )


def _record_like(
    interceptor: CallInterceptor, forwards: Sequence[Callable[[], Any]], like: Tape
) -> Tape:
    drawing = like.drawing
    while True:
        try:
            return _agree(interceptor, forwards, like.open, drawing, like.seeds, counts=False)
        except MustBeEvent as draws:
            drawing |= {draws.name}
        except CannotRecord as unclear:
            raise PlanError(_refusal(interceptor.model, unclear.reason)) from None


def _agree(
    interceptor: CallInterceptor,
    forwards: Sequence[Callable[[], Any]],
    opened: frozenset[str],
    drawing: frozenset[str],
    seeds: PieceSeeds | None,
    counts: bool = True,
) -> Tape:
    """The tape of the first forward, once all the others have taken the same path."""
    tapes = [
        record_forward(
            interceptor,
            f,
            open_modules=opened,
            drawing=drawing,
            seeds=seeds,
            counts=counts and not i,
        )
        for i, f in enumerate(forwards)
    ]
    for other in tapes[1:]:
        _compare(tapes[0], other)
        # What a unit left for others in one forward and not in the next is a cache, which each
        # stage makes for itself.
        tapes[0].uncut &= other.uncut
    return tapes[0]


def _compare(one: Tape, two: Tape) -> None:
    pairs = list(zip(one.events, two.events))
    for index, (a, b) in enumerate(pairs):
        if _form(one, a) != _form(two, b):
            what = a.name if a.name == b.name else f"{a.name} or {b.name}"
            reason = f"{what} (event {index}) differs from one batch to the next"
            raise CannotRecord(a.where if len(a.where) >= len(b.where) else b.where, reason)
    if len(one.events) != len(two.events):
        longer = max(one.events, two.events, key=len)[len(pairs)]
        raise CannotRecord(longer.where, f"{longer.name} is called for some batches only")


def _form(tape: Tape, event: Event) -> tuple[Any, ...]:
    shapes = [tape.values[r.number] for r in event.result if isinstance(r, ValueLeaf)]
    plain = [r.value for r in event.result if isinstance(r, PlainLeaf)]
    return event.name, event.where, shapes, plain, event.adopts


def _refusal(model: nn.Module, reason: str) -> str:
    return (
        f"{type(model).__name__} cannot be cut into stages: in its forward {reason}. The code "
        "between cut modules must take one path for all data and leave backward to torch. Put the "
        "part that does not into a submodule of its own, which then stays whole, or leave out "
        "pipeline."
    )


def _open_at_first(model: nn.Module, num_stages: int) -> frozenset[str]:
    """The root, and every module with so many parameters that it may have to be cut."""
    total = sum(p.numel() for p in model.parameters())
    wanted = {
        name
        for name, module in model.named_modules()
        if sum(p.numel() for p in module.parameters()) > total / (2 * num_stages)
        and _can_open(module)
    }
    return _without(frozenset(wanted | {""}), set())


def _can_open(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.ModuleDict)
    return any(True for _ in module.children()) and not isinstance(module, _WHOLE + containers)


def _without(wanted: frozenset[str], closed: set[str]) -> frozenset[str]:
    """Open modules of which none is closed, nor inside of one that is not open."""
    # Containers have no forward to open: what counts is that all callable modules above are open.
    return frozenset(
        name
        for name in wanted
        if not any(name == shut or name.startswith(f"{shut}.") for shut in closed)
    )


def _open_across(plan: StagePlan) -> frozenset[str]:
    """The open modules in whose code a cut falls; the others may run as units."""
    events = plan.tape.events
    needed = {""}
    for stage in plan.stages[1:]:
        before, after = events[stage.start - 1].where, events[stage.start].where
        shared = [
            name for name in plan.tape.open if name and _is_in(before, name) and _is_in(after, name)
        ]
        needed.update(shared)
    return frozenset(needed)


def _is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


@contextmanager
def _untouched(model: nn.Module, seeds: PieceSeeds | None) -> Iterator[None]:
    """Put buffers and random state back afterwards."""
    places = [
        (module, name, buffer, buffer.clone())
        for module in dict.fromkeys(model.modules())
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            if seeds is None:
                yield
            else:
                with seeds.restored():
                    yield
        finally:
            for module, name, buffer, value in places:
                module._buffers[name] = buffer
                with torch.no_grad():
                    buffer.copy_(value)
