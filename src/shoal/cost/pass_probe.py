"""Watch one forward and backward pass, event by event: seconds, live bytes, flops, messages.

A `PassProbe` stands before the submodules that are events of the recorded forward. Each start of
one ends the segment of the event before it; in backward an event begins when the gradient of its
result is there. Operations between submodules count for the one before them.

`LiveBytes` sees every tensor that is made and when its memory is freed, on real and on fake
tensors alike, so activations are measured and not guessed from the code of a model.
Cost: a few microseconds an operation while it watches. Read next: `profile.py`.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose results, or their shapes, are values of tensors.
_READ = {
    getattr(torch.ops.aten, name)
    for name in (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_consecutive",
    )
}


class LiveBytes(TorchDispatchMode):
    """The bytes of tensors that were made inside and are not freed. `peak` is the most since
    `reset_peak`; `reads_values`: whether code looked at values, and so may go other ways."""

    def __init__(self, known: Iterable[Tensor] = (), data: Iterable[Tensor] = ()):
        """`known` tensors, and views of them, are not counted. What is made of `data`, or drawn,
        has values that another batch has not; others, such as positions, may be looked at."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.reads_values = False
        self._storages = {_key(tensor) for tensor in known if _has_storage(tensor)}
        self._of_data = {_key(tensor) for tensor in data if _has_storage(tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        is_of_data = torch.Tag.nondeterministic_seeded in func.tags or any(
            _key(leaf) in self._of_data
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and _has_storage(leaf)
        )
        self.reads_values |= is_of_data and func.overloadpacket in _READ
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _has_storage(leaf):
                self._add(leaf)
                if is_of_data:
                    self._of_data.add(_key(leaf))
        return result

    def reset_peak(self) -> int:
        """The most since the last call."""
        most, self.peak = self.peak, self.live
        return most

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = storage.nbytes()
        self._storages.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, num_bytes)

    def _freed(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self._of_data.discard(key)
        self.live -= num_bytes


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Segment(NamedTuple):
    """What one event did in forward or in backward."""

    event: int
    is_backward: bool
    seconds: float
    before: int  # live bytes
    after: int
    peak: int
    flops: int
    messages: int
    message_bytes: int


class _Mark(NamedTuple):
    event: int
    is_backward: bool
    at: float
    live: int
    peak: int
    flops: int
    messages: int
    message_bytes: int


class PassCounters(NamedTuple):
    """What else is looked at where events begin."""

    live: LiveBytes | None = None
    flops: Callable[[], int] = lambda: 0
    messages: Callable[[], tuple[int, int]] = lambda: (0, 0)  # and their bytes


class PassProbe:
    """Marks where the events of a pass begin. `close` takes its hooks off."""

    def __init__(self, model: nn.Module, units: Sequence[tuple[int, str]], num_events: int):
        """`units` are the numbers and names of the submodules, in the order of their calls."""
        self._last = num_events - 1
        self._numbers: dict[str, list[int]] = {}
        for number, name in units:
            self._numbers.setdefault(name, []).append(number)
        self._handles = []
        for name in self._numbers:
            module = model.get_submodule(name)
            before, after = partial(self._begins, name), partial(self._ended, name)
            self._handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
        self._counters = PassCounters()
        self.is_unlike = False  # whether submodules were called otherwise than recorded

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def watch(
        self,
        goal: Callable[[], tuple[Tensor, Tensor | None]],
        counters: "PassCounters | None" = None,
    ) -> list[Segment]:
        """Run a forward, which returns a loss and the gradient to start with, and its backward;
        with `counters` more than seconds are told."""
        self._counters = counters or PassCounters()
        self._marks: list[_Mark] = []
        self._calls = dict.fromkeys(self._numbers, 0)
        self._mark(0, False)
        loss, start = goal()
        self._mark(self._last, True)
        loss.backward(start)
        self._mark(-1, True)
        called = all(self._calls[name] == len(own) for name, own in self._numbers.items())
        self.is_unlike = self.is_unlike or not called
        return [_segment(a, b) for a, b in zip(self._marks, self._marks[1:])]

    def _begins(self, name: str, module: nn.Module, args: Any) -> None:
        at, numbers = self._calls[name], self._numbers[name]
        self._calls[name] = at + 1
        if torch.is_grad_enabled() and at < len(numbers):
            self._mark(numbers[at], False)

    def _ended(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        at, numbers = self._calls[name] - 1, self._numbers[name]
        for leaf in tree_leaves(output) if at < len(numbers) else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(partial(self._arrived, numbers[at]))
                return

    def _arrived(self, number: int, gradient: Tensor) -> None:
        self._mark(number, True)

    def _mark(self, event: int, is_backward: bool) -> None:
        tracked, flops, messages = self._counters
        live, peak = (0, 0) if tracked is None else (tracked.live, tracked.reset_peak())
        counts = messages()
        now = thread_time()
        self._marks.append(_Mark(event, is_backward, now, live, peak, flops(), *counts))


def _segment(mark: _Mark, until: _Mark) -> Segment:
    return Segment(
        mark.event,
        mark.is_backward,
        until.at - mark.at,
        mark.live,
        until.live,
        max(until.peak, mark.live),
        until.flops - mark.flops,
        until.messages - mark.messages,
        until.message_bytes - mark.message_bytes,
    )
