"""Runs one stage of a model's own forward: skips the events before it, stops after it.

A stage calls the model's forward. Events before its first are skipped: each returns what the stage
received, or a placeholder of the right shape that holds no memory. Its own events run as they are,
on real tensors. After the last of them an exception that no `except Exception` catches ends the
forward. So skip connections, several inputs, tuples, keyword arguments and
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
from shoal.parallel.pipeline.calls import (
    HOOKS,
    LAYOUT,
    TAG,
    CallInterceptor,
    CallObserver,
    ValueTag,
    leaves,
)
from shoal.parallel.pipeline.cuts import StageSpec
from shoal.parallel.pipeline.placeholders import (
    AbsentObject,
    in_use_by,
    make_placeholder,
    without_partial,
)
from shoal.parallel.pipeline.tape import (
    ArgumentLeaf,
    Event,
    OpaqueLeaf,
    Tape,
    ValueLeaf,
    find_tensors,
    units_of,
)


class StageEnd(BaseException):
    """The stage is done; other stages run the rest of the forward."""


class StageRunner:
    """Runs the events of one stage. `interceptor` is that of the model."""

    def __init__(self, interceptor: CallInterceptor, tape: Tape, spec: StageSpec, is_last: bool):
        self.interceptor, self.tape, self.spec, self.is_last = interceptor, tape, spec, is_last
        self.units = units_of(interceptor.model, tape.open)
        interceptor.cover(self.units)
        self.has_parameters = {
            name: any(True for _ in interceptor.model.get_submodule(name).parameters())
            for name in self.units
        }
        skipped = [n for n, at in tape.made_at.items() if at < spec.start]
        self.placeholders = {
            n: make_placeholder(tape.values[n], n) for n in skipped if n not in spec.received
        }
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
        observer = _StageForward(self, dict(zip(self.spec.received, received, strict=True)))
        try:
            with in_use_by(f"Stage {self.spec.index} of the pipeline"), observer:
                observer.start()
                output = forward()
        except StageEnd:
            return self._to_send([observer.live[number] for number in self.spec.sent])
        observer.check_end(output)
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


class _StageForward(CallObserver):
    def __init__(self, stage: StageRunner, received: dict[int, Tensor]):
        super().__init__(stage.interceptor, stage.tape.drawing)
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
            raise StageEnd

    def called(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        owns = self.stage.has_parameters.get(name)
        if owns is None:  # an open module, or one that is open in another tape
            return call(*args, **kwargs)
        if not owns and name not in self.drawing and not self._holds_computed((args, kwargs)):
            if name in self.draws_again:
                self._set_seed()
            return self.interceptor.unwatched(call, args, kwargs)
        event = self._next(name)
        if self.index <= self.first:
            return self._skip(event, args, kwargs)
        self._check(args, kwargs)
        self._set_seed()
        return self._take(event, self.interceptor.unwatched(call, args, kwargs), args, kwargs)

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
        if name in HOOKS and (tag.is_placeholder or self.index < self.first):
            return RemovableHandle(OrderedDict())  # the stage that receives the value registers it
        if not tag.is_placeholder:
            return function(*args, **kwargs)
        if name == "requires_grad":
            return tag.number in self.stage.tape.need_gradient
        if name in LAYOUT:
            value = self.stage.tape.values[tag.number]
            like = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
            return function(like, *args[1:], **kwargs)
        return function(*args, **kwargs)

    def _holds_computed(self, tree: Any) -> bool:
        return any(self.tag(tensor) is not None for tensor in find_tensors(tree))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for item in (*args, *kwargs.values()):
            if (
                isinstance(item, Tensor)
                and (tag := self.tag(item)) is not None
                and tag.is_placeholder
            ):
                raise RuntimeError(f"value {tag.number} is used here and was not received")

    def check_end(self, output: Any) -> None:
        if not self.stage.is_last or self.index != len(self.events):
            raise self._diverged("its end")
        for tensor in find_tensors(output):
            if (tag := self.tag(tensor)) is not None and tag.is_placeholder:
                raise RuntimeError(f"value {tag.number} of the output was not received")

    def _next(self, name: str) -> Event:
        if self.index == len(self.events):
            raise self._diverged(name)
        event = self.events[self.index]
        if event.name != name:
            raise self._diverged(name)
        self.index += 1
        return event

    def raw(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in self.draws_again:
            self._set_seed()
        return call(*args, **kwargs)

    def _set_seed(self) -> None:
        """Set the generator as the last skipped event did, unless it was set again since."""
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
                self._issue(leaf.number) if isinstance(leaf, ValueLeaf)
                else items[leaf.place] if isinstance(leaf, ArgumentLeaf)
                else AbsentObject(leaf.kind) if isinstance(leaf, OpaqueLeaf)
                else leaf.value
                for leaf in event.result
            ]  # fmt: skip
            result = tree_unflatten(flat, event.spec)
        if self.index == self.stop:
            raise StageEnd
        return result

    def _issue(self, number: int) -> Tensor:
        """The tensor of this number: received, or its placeholder."""
        tensor = self.received.get(number)
        if tensor is not None:
            if number in self.sent:
                self.live[number] = tensor
            setattr(tensor, TAG, ValueTag(self.forward, number))
            return tensor
        tensor = self.stage.placeholders[number]
        setattr(tensor, TAG, ValueTag(self.forward, number, True))
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
                setattr(tagged, TAG, ValueTag(self.forward, number, there is None))
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
                setattr(tensor, TAG, ValueTag(self.forward, number))
        if event.only is not None:
            self._keep(result, event.only)
        else:
            for leaf, tensor in zip(event.result, tree_leaves(result)):
                if isinstance(leaf, ValueLeaf):
                    self._keep(tensor, leaf.number)
        if self.index == self.stop:
            raise StageEnd
        return result

    def _keep(self, tensor: Tensor, number: int) -> None:
        setattr(tensor, TAG, ValueTag(self.forward, number))
        if number in self.sent:
            self.live[number] = tensor

    def _diverged(self, name: str) -> PlanError:
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
