"""Seeing every call of a forward pass without changing the model.

A forward is a sequence of *events*: calls of *units* (submodules that stay whole) and operations
on what units computed, in the code of the modules around them, which are *open*. A `Gate` stands
before a model's submodules; a `Watch` is told of each event while it is on. Operations that touch
only the model's inputs (masks, positions) are no events: they are cheap, and are done again
wherever they are needed.

Computed tensors carry a tag with their number; parameters never do, since an operation may return
its argument. Cost: a few microseconds per operation of an open module and per unit.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

TAG = "_shoal_value"
# Ask for a tensor's form, not for its numbers.
_FORM = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "element_size",
        "__len__",
        "get_device",
        "data_ptr",
        "storage_offset",
        "is_same_size",
        "requires_grad_",
        "__hash__",
        "type",
        "__format__",
        "__repr__",
        "__str__",
        "is_tensor",
        "is_nonzero_static",
        "result_type",
        "can_cast",
        "is_inference",
        "is_conj",
        "is_neg",
        "is_shared",
        "is_pinned",
        "untyped_storage",
        "has_names",
        "is_coalesced",
        "register_hook",
        "retain_grad",
        "register_post_accumulate_grad_hook",
    ]
)
LAYOUT = frozenset({"stride", "is_contiguous"})
HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


class Tag(NamedTuple):
    """On a tensor: the forward that computed it, its number there, and whether it is a stand-in."""

    forward: object
    number: int
    stands_in: bool = False


class Action(NamedTuple):
    """What a function of torch is to a watch."""

    name: str
    is_event: bool


def action_of(function: Any) -> Action:
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(function.__self__, "__name__", name)
        writes_data = name == "__set__" and attribute == "data"
        reads_tensor = name == "__get__" and attribute in _TENSOR_ATTRIBUTES
        return Action(
            f"{name} {attribute}" if writes_data else attribute, reads_tensor or writes_data
        )
    return Action(name, name not in _FORM)


_ACTIONS: dict[Any, Action] = {}


def known_action(function: Any) -> Action:
    action = _ACTIONS.get(function)
    if action is None:
        action = _ACTIONS[function] = action_of(function)
    return action


def leaves(tree: Any, found: list[Any]) -> list[Any]:
    """Everything in the lists, tuples, dicts and slices of arguments, in order."""
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            leaves(item, found)
    elif kind is slice:
        leaves((tree.start, tree.stop, tree.step), found)
    elif isinstance(tree, dict):
        for item in tree.values():
            leaves(item, found)
    elif isinstance(tree, list | tuple):
        for item in tree:
            leaves(item, found)
    else:
        found.append(tree)
    return found


class Gate:
    """Stands before the submodules of one model: lets them run, or tells the watch that is on."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.watch: Watch | None = None
        self._covered: dict[str, nn.Module] = {}

    def cover(self, names: Iterable[str]) -> None:
        """Stand before these submodules too."""
        for name in names:
            if name and name not in self._covered:
                module = self._covered[name] = self.model.get_submodule(name)
                module.__dict__["_compiled_call_impl"] = self._stand_before(name, module)

    def close(self) -> None:
        for module in self._covered.values():
            # What stood there before: the class's None, or a compiled call.
            call = module.__dict__.pop("_compiled_call_impl")
            if call.compiled is not None:
                module.__dict__["_compiled_call_impl"] = call.compiled
        self._covered.clear()

    def unwatched(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit; what it does inside is nobody's business."""
        watch, self.watch = self.watch, None
        mode = _pop_mode()
        try:
            return call(*args, **kwargs)
        finally:
            _push_mode(mode)
            self.watch = watch

    def _stand_before(self, name: str, module: nn.Module) -> Callable[..., Any]:
        # torch asks this attribute before hooks run: a unit that is skipped runs none.
        compiled = module.__dict__.get("_compiled_call_impl")
        plain = module._call_impl if compiled is None else compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            watch = self.watch
            if watch is None:
                return plain(*args, **kwargs)
            return watch.called(name, plain, args, kwargs)

        call.compiled = compiled  # type: ignore[attr-defined]
        return call


def _as_written() -> AbstractContextManager[Any]:
    """Functions that the model has compiled run as they were written: a graph shows no calls."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing was compiled
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


class Watch(TorchFunctionMode, ABC):
    """Is told of the calls of one forward, which runs in it: `with watch: model(x)`.

    A child class says what an event means.
    """

    def __init__(self, gate: Gate, drawing: frozenset[str]):
        super().__init__()
        self.gate = gate
        self.drawing = drawing  # names that draw random numbers even from raw inputs: events too
        self.forward = object()

    def __enter__(self) -> Self:
        self.gate.watch = self
        self._eagerly = _as_written()
        self._eagerly.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eagerly.__exit__(None, None, None)
        self.gate.watch = None

    @abstractmethod
    def called(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A submodule is called."""

    @abstractmethod
    def event(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operation on computed tensors or parameters is called."""

    def raw(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operation on the model's inputs alone is called."""
        return call(*args, **kwargs)

    def form(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The form of a computed tensor is asked for."""
        return function(*args, **kwargs)

    def tag(self, tensor: Tensor) -> Tag | None:
        """The tag that this very forward put on a tensor."""
        tag: Tag | None = getattr(tensor, TAG, None)
        return tag if tag is not None and tag.forward is self.forward else None

    def is_computed(self, tensor: Tensor) -> bool:
        return self.tag(tensor) is not None or isinstance(tensor, nn.Parameter)

    def touches_computed(self, items: Iterable[Any]) -> bool:
        """Whether arguments hold a parameter or what this forward computed."""
        for item in items:
            if isinstance(item, Tensor):
                if self.is_computed(item):
                    return True
            elif isinstance(item, tuple | list | dict | slice) and self.touches_computed(
                leaves(item, [])
            ):
                return True
        return False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, is_event = known_action(func)
        if name == "__iter__":  # an iterator cannot stand in for anything; its tensors can
            return iter(self.__torch_function__(Tensor.unbind, types, args, kwargs))
        if not self.touches_computed(args) and not (
            kwargs and self.touches_computed(kwargs.values())
        ):
            if name in self.drawing:
                return self.event(name, func, args, kwargs)
            return self.raw(name, func, args, kwargs)
        if is_event:
            return self.event(name, func, args, kwargs)
        return self.form(name, func, args, kwargs)
