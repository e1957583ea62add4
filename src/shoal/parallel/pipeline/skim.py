"""Running one stage of a model's own forward: skim what comes before, leave after it.

A stage calls the model as anybody would. Events before its first are skipped: each returns what
the stage received, or a stand-in of the right form that holds no memory. Its own events run as
they are, on real tensors. After the last of them it leaves the forward by an exception that no
`except Exception` sees. So skip connections, several inputs, tuples, keyword arguments and
parameters used twice need no code of their own, and every rank keeps the model's names.

Hooks of skipped units do not run; those of open modules run on every stage.
Cost: a few microseconds per skipped unit and per operation of an open module.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from shoal.errors import PlanError
from shoal.parallel.pipeline.absent import Missing, in_use_by, stand_in, without_partial
from shoal.parallel.pipeline.calls import HOOKS, LAYOUT, TAG, Gate, Tag, Watch, leaves
from shoal.parallel.pipeline.cuts import StageSpec
from shoal.parallel.pipeline.tape import Event, Made, Opaque, Passed, Tape, reach, units_of


class Leave(BaseException):
    """The stage is done; the rest of the forward is another's."""


class Stage:
    """Runs the events of one stage. `gate` stands before the submodules of the model."""

    def __init__(self, gate: Gate, tape: Tape, spec: StageSpec, is_last: bool):
        self.gate, self.tape, self.spec, self.is_last = gate, tape, spec, is_last
        self.units = units_of(gate.model, tape.open)
        gate.cover(self.units)
        self.has_parameters = {
            name: any(True for _ in gate.model.get_submodule(name).parameters())
            for name in self.units
        }
        skipped = [n for n, at in tape.made_at.items() if at < spec.start]
        self.stand_ins = {n: stand_in(tape.values[n], n) for n in skipped if n not in spec.received}
        self.partial = [path for path, at in tape.partial.items() if at < spec.start]
        # None: as it is.
        self.orders_in = [_back(tape.values[n].order) for n in spec.received]
        self.orders_out = [_unless_same(tape.values[n].order) for n in spec.sent]
        self.mutates = any(event.mutates for event in tape.events[spec.start : spec.stop])
        self.changes_received = self.mutates or any(self.orders_in)

    def __call__(self, forward: Callable[[], Any], received: Sequence[Tensor] = ()) -> Any:
        """The tensors to send, or the model's output if this is the last stage."""
        if self.changes_received:
            received = self._as_made(received)
        skim = _Skim(self, dict(zip(self.spec.received, received, strict=True)))
        try:
            with in_use_by(f"Stage {self.spec.index} of the pipeline"), skim:
                skim.start()
                output = forward()
        except Leave:
            return self._to_send([skim.live[number] for number in self.spec.sent])
        skim.check_end(output)
        return without_partial(output, self.partial) if self.partial else output

    def _as_made(self, received: Sequence[Tensor]) -> list[Tensor]:
        """In the layout that they were made in, and not to be written into if torch forbids it."""
        ordered = [
            t if order is None else t.permute(order) for t, order in zip(received, self.orders_in)
        ]
        # torch forbids writing into what a gradient is asked for
        return [t.clone() if self.mutates and t.requires_grad else t for t in ordered]

    def _to_send(self, values: list[Tensor]) -> tuple[Tensor, ...]:
        """Contiguous, and each a tensor of its own: schedules detach them in place."""
        if torch.is_grad_enabled():
            for number, value in zip(self.spec.sent, values):
                if value.requires_grad and number not in self.tape.need_gradient:
                    raise RuntimeError(f"value {number} needs a gradient that no rank would send")
        ordered = [
            value if order is None else value.permute(order)
            for value, order in zip(values, self.orders_out)
        ]
        alone = len(values) == 1
        return tuple(
            value.contiguous()
            if alone and not value.is_leaf and not value._is_view()
            else value.clone(memory_format=torch.contiguous_format)
            for value in ordered
        )


class _Skim(Watch):
    def __init__(self, stage: Stage, received: dict[int, Tensor]):
        super().__init__(stage.gate, stage.tape.drawing)
        self.stage, self.received = stage, received
        self.events, spec = stage.tape.events, stage.spec
        self.first, self.index = spec.start, 0
        self.stop = None if stage.is_last else spec.stop  # where it leaves
        self.sent = frozenset(spec.sent)
        self.live: dict[int, Tensor] = {}
        self.seeds, self.draws_again = stage.tape.seeds, stage.tape.draws_again
        self.due: tuple[int, int] | None = None  # a block that a skipped event set, and when

    def start(self) -> None:
        """Draw as from the start; a stage without events sends on what it received."""
        if self.seeds is not None and self.draws_again:
            self.seeds.set(0)
        if self.stop == 0:
            raise Leave

    def called(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        owns = self.stage.has_parameters.get(name)
        if owns is None:  # an open module, or one that is open in another tape
            return call(*args, **kwargs)
        if not owns and name not in self.drawing and not self._holds_computed((args, kwargs)):
            if name in self.draws_again:
                self._set_seed()
            return self.gate.unwatched(call, args, kwargs)
        event = self._next(name)
        if self.index <= self.first:
            return self._skip(event, args, kwargs)
        self._check(args, kwargs)
        self._set_seed()
        return self._take(event, self.gate.unwatched(call, args, kwargs), args, kwargs)

    def event(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        event = self._next(name)
        if self.index <= self.first:
            return self._skip(event, args, kwargs)
        self._check(args, kwargs)
        self._set_seed()
        return self._take(event, call(*args, **kwargs), args, kwargs)

    def form(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tag = self.tag(args[0]) if args and isinstance(args[0], Tensor) else None
        if tag is None:
            return function(*args, **kwargs)
        if name in HOOKS and (tag.stands_in or self.index < self.first):
            return RemovableHandle(OrderedDict())  # the stage that comes to it next hangs it on
        if not tag.stands_in:
            return function(*args, **kwargs)
        if name == "requires_grad":
            return tag.number in self.stage.tape.need_gradient
        if name in LAYOUT:
            value = self.stage.tape.values[tag.number]
            like = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
            return function(like, *args[1:], **kwargs)
        return function(*args, **kwargs)

    def _holds_computed(self, tree: Any) -> bool:
        return any(self.tag(tensor) is not None for tensor in reach(tree))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for item in (*args, *kwargs.values()):
            if isinstance(item, Tensor) and (tag := self.tag(item)) is not None and tag.stands_in:
                raise RuntimeError(f"value {tag.number} is used here and was not received")

    def check_end(self, output: Any) -> None:
        if not self.stage.is_last or self.index != len(self.events):
            raise self._astray("its end")
        for tensor in reach(output):
            if (tag := self.tag(tensor)) is not None and tag.stands_in:
                raise RuntimeError(f"value {tag.number} of the output was not received")

    def _next(self, name: str) -> Event:
        if self.index == len(self.events):
            raise self._astray(name)
        event = self.events[self.index]
        if event.name != name:
            raise self._astray(name)
        self.index += 1
        return event

    def raw(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in self.draws_again:
            self._set_seed()
        return call(*args, **kwargs)

    def _set_seed(self) -> None:
        """Set the generator as the last skipped event did, unless it was set anew since."""
        if self.due is not None and self.seeds is not None:
            block, num_sets = self.due
            self.due = None
            if self.seeds.num_sets == num_sets:
                self.seeds.set(block)

    def _skip(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the event would have returned, without running it."""
        if event.block_after is not None and self.seeds is not None:
            self.due = event.block_after, self.seeds.num_sets
        if event.adopts:
            self._fill(event, args, kwargs)
        if event.only is not None:
            result = self._issue(event.only)
        else:
            items = leaves((args, kwargs), []) if event.passes else []
            flat = [
                self._issue(leaf.number) if isinstance(leaf, Made)
                else items[leaf.place] if isinstance(leaf, Passed)
                else Missing(leaf.kind) if isinstance(leaf, Opaque)
                else leaf.value
                for leaf in event.result
            ]  # fmt: skip
            result = tree_unflatten(flat, event.spec)
        if self.index == self.stop:
            raise Leave
        return result

    def _issue(self, number: int) -> Tensor:
        """The tensor of this number: received, or its stand-in."""
        tensor = self.received.get(number)
        if tensor is not None:
            if number in self.sent:
                self.live[number] = tensor
            setattr(tensor, TAG, Tag(self.forward, number))
            return tensor
        tensor = self.stage.stand_ins[number]
        setattr(tensor, TAG, Tag(self.forward, number, True))
        return tensor

    def _fill(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write what was received into the raw tensors that the event would have written into."""
        items = leaves((args, kwargs), [])
        for place, number in event.adopts:
            tensor = items[place]
            whole = tensor if tensor._base is None else tensor._base
            there = self.received.get(number)
            if there is not None:
                whole.copy_(there)
                if number in self.sent:
                    self.live[number] = whole
            for tagged in (whole, tensor):
                setattr(tagged, TAG, Tag(self.forward, number, there is None))
            self.received.setdefault(number, whole)

    def _take(
        self, event: Event, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Tag what an event of this stage made, and keep what will be sent."""
        if event.adopts:
            items = leaves((args, kwargs), [])
            for place, number in event.adopts:
                tensor = items[place]
                self._keep(tensor if tensor._base is None else tensor._base, number)
                setattr(tensor, TAG, Tag(self.forward, number))
        if event.only is not None:
            self._keep(result, event.only)
        else:
            for leaf, tensor in zip(event.result, tree_leaves(result)):
                if isinstance(leaf, Made):
                    self._keep(tensor, leaf.number)
        if self.index == self.stop:
            raise Leave
        return result

    def _keep(self, tensor: Tensor, number: int) -> None:
        setattr(tensor, TAG, Tag(self.forward, number))
        if number in self.sent:
            self.live[number] = tensor

    def _astray(self, name: str) -> PlanError:
        expected = self.events[self.index].name if self.index < len(self.events) else "the end"
        return PlanError(
            f"The forward of {self.stage.tape.model} came to {name} where it came to {expected} "
            f"when it was recorded (event {self.index}): it depends on data. Put the part that "
            "does into a submodule of its own, which then stays whole, or leave out pipeline."
        )


def _unless_same(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


def _back(order: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order that undoes this one."""
    return _unless_same(tuple(sorted(range(len(order)), key=order.__getitem__)))
