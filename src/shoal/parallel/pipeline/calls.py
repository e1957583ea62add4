"""Intercepts every call of a forward pass without changing the model.

A forward is a sequence of *events*: calls of *units* (submodules that stay whole) and operations on
what units computed, in the code of the modules that contain them, which are *open*. A
`CallInterceptor` intercepts the calls of a model's submodules; a `CallObserver` gets each event
while it is active. Operations on the model's inputs alone (masks, positions) are no events: they
are cheap, and are repeated wherever they are needed.

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

from shoal.numerics.compiled import is_transformed, untransformed

TAG = "_shoal_value"
# Ask for a tensor's form, not for its numbers.
_FORM = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous"),
        *("is_floating_point", "is_complex", "is_signed", "element_size", "__len__", "get_device"),
        *("data_ptr", "storage_offset", "is_same_size", "requires_grad_", "__hash__", "type"),
        *("__format__", "__repr__", "__str__", "is_tensor", "is_nonzero_static", "result_type"),
        *("can_cast", "is_inference", "is_conj", "is_neg", "is_shared", "is_pinned"),
        *("untyped_storage", "has_names", "is_coalesced", "register_hook", "retain_grad"),
        "register_post_accumulate_grad_hook",
    ]
)
LAYOUT = frozenset({"stride", "is_contiguous"})
HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


class ValueTag(NamedTuple):
    """On a tensor: the forward that computed it, its number there, whether it is a placeholder."""

    forward: object
    number: int
    is_placeholder: bool = False


class TorchCall(NamedTuple):
    """The name of a torch function, and whether a call of it is an event."""

    name: str
    is_event: bool


def classify_call(function: Any) -> TorchCall:
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(function.__self__, "__name__", name)
        writes_data = name == "__set__" and attribute == "data"
        reads_tensor = name == "__get__" and attribute in _TENSOR_ATTRIBUTES
        return TorchCall(
            f"{name} {attribute}" if writes_data else attribute, reads_tensor or writes_data
        )
    return TorchCall(name, name not in _FORM)


_ACTIONS: dict[Any, TorchCall] = {}


def torch_call(function: Any) -> TorchCall:
    action = _ACTIONS.get(function)
    if action is None:
        action = _ACTIONS[function] = classify_call(function)
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


class CallInterceptor:
    """Intercepts calls of a model's submodules: runs them, or calls the active observer."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.observer: CallObserver | None = None
        self._covered: dict[str, nn.Module] = {}

    def cover(self, names: Iterable[str]) -> None:
        """Intercept these submodules too."""
        for name in names:
            if name and name not in self._covered:
                module = self._covered[name] = self.model.get_submodule(name)
                module.__dict__["_compiled_call_impl"] = self._intercept(name, module)

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
        """Run a unit without the observer: calls inside of it are no events."""
        observer, self.observer = self.observer, None
        mode = _pop_mode()
        try:
            return call(*args, **kwargs)
        finally:
            _push_mode(mode)
            self.observer = observer

    def _intercept(self, name: str, module: nn.Module) -> Callable[..., Any]:
        # torch asks this attribute before hooks run: a unit that is skipped runs none.
        compiled = module.__dict__.get("_compiled_call_impl")
        plain = module._call_impl if compiled is None else compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            observer = self.observer
            if observer is None:
                return plain(*args, **kwargs)
            return observer.called(name, plain, args, kwargs)

        call.compiled = compiled  # type: ignore[attr-defined]
        return call


def _as_written() -> AbstractContextManager[Any]:
    """Functions that the model has compiled run as they were written: a graph shows no calls."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing was compiled
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


class CallObserver(TorchFunctionMode, ABC):
    """Gets the calls of one forward, which runs in it: `with observer: model(x)`.

    A child class says what an event means.
    """

    def __init__(self, interceptor: CallInterceptor, drawing: frozenset[str]):
        super().__init__()
        self.interceptor = interceptor
        self.drawing = drawing  # names that draw random numbers even from raw inputs: events too
        self.forward = object()

    def __enter__(self) -> Self:
        self.interceptor.observer = self
        self._eagerly = _as_written()
        self._eagerly.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._eagerly.__exit__(None, None, None)
        self.interceptor.observer = None

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

    def tag(self, tensor: Tensor) -> ValueTag | None:
        """The tag that this very forward put on a tensor."""
        tag: ValueTag | None = getattr(tensor, TAG, None)
        return tag if tag is not None and tag.forward is self.forward else None

    def is_computed(self, tensor: Tensor) -> bool:
        if is_transformed():
            tensor = untransformed(tensor)
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
        name, is_event = torch_call(func)
        if name == "__iter__":  # an iterator cannot be replaced by a placeholder; its tensors can
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
