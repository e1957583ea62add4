"""Runs the forward pass of a model whose matrices are cut.

A `TensorForward` is entered around each forward. It sees every torch function; those that meet a
cut parameter or a part go to a rule (`matrix.py`, `rules.py`, `shapes.py`), all
others run as they are. A function without a rule is given whole values instead, gathered from all
ranks: slower, never wrong. So the result does not depend on which matrices were cut.

Parameters stay plain and local. What they are a part of is an attribute (`part.TAG`),
because FSDP puts other parameter objects into a module for the time of its forward.

Cost: about a microsecond for a function that meets nothing cut.
"""

import dataclasses
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Self

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shoal.comm.collectives import Group
from shoal.errors import RecipeError, ShoalError
from shoal.parallel.tensor.matrix import MATRICES
from shoal.parallel.tensor.part import ABOUT, TAG, Part, Refused, Region, about, make_part
from shoal.parallel.tensor.rules import RULES, cast, made_whole, pointwise
from shoal.parallel.tensor.shapes import SHAPES, Args, Kwargs, Rule, cat, stack

# Rules that want a part as an argument.
PARTS: dict[Any, Rule] = {
    **RULES,
    **SHAPES,
    Tensor.data.__get__: pointwise,  # type: ignore[attr-defined]
}
_MIXED = {pointwise, cast, made_whole, cat, stack}
# What concerns a tensor as an object of this rank.
_OWN = {
    *(getattr(Tensor, name).__get__ for name in ("grad", "_backward_hooks", "_base")),
    *(getattr(Tensor, name).__set__ for name in ("grad", "data", "requires_grad")),
    *(Tensor.register_hook, Tensor.requires_grad_, Tensor.retain_grad, Tensor.data_ptr),
    *(Tensor.register_post_accumulate_grad_hook, Tensor.untyped_storage, Tensor.storage_offset),
}


def _opened(function: Any) -> FunctionType:
    """A composite function of torch that lets its steps be seen instead of itself."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


OPENED = {F.multi_head_attention_forward: _opened(F.multi_head_attention_forward)}


def holds_cut(values: Any) -> bool:
    """Whether a cut parameter is among some arguments."""
    for value in values:
        kind = type(value)
        if kind is Parameter:
            if hasattr(value, TAG):
                return True
        elif (kind is list or kind is tuple) and holds_cut(value):
            return True
    return False


class CutForward(TorchFunctionMode):
    """Sends functions to rules; what parts are made of is the region's affair."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.region.forget()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs:
            if not types and not holds_cut(args):
                return func(*args)
            return self.meet(func, args, {})
        if not types and not holds_cut(args) and not holds_cut(kwargs.values()):
            return func(*args, **kwargs)
        return self.meet(func, args, kwargs)

    def meet(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """A function that is given something cut, or a tensor of a foreign class."""
        try:
            rule = MATRICES.get(func)
            if rule is not None:
                return rule(self.region, func, args, kwargs)
            if func in _OWN:
                return func(*map(_local, args), **kwargs)
            if func in OPENED:
                with self:
                    return OPENED[func](*args, **kwargs)
            cut_args = tuple(map(self._as_part, args))
            if func in ABOUT and type(cut_args[0]) is Part:
                return about(func, cut_args, kwargs)
            rule = PARTS.get(func)
            cut_kwargs = {name: self._as_part(value) for name, value in kwargs.items()}
            if rule is not None and has_part((*cut_args, *cut_kwargs.values())):
                return follow_rule(rule, self.region, func, cut_args, cut_kwargs)
        except Exception as error:
            # Refused, or a use of the function that the rule does not know. If the model is wrong
            # it fails again on whole values, in its own terms.
            if isinstance(error, ShoalError) and not isinstance(error, RecipeError):
                raise
        return self.on_whole_values(func, args, kwargs)

    def on_whole_values(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """The way that is always right: gather, then compute as the uncut model does."""
        whole_args, whole_kwargs = tree_map(self._whole, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        if args and type(args[0]) is Part and result is whole_args[0]:  # written in place
            args[0].local = self.region.local(result, args[0].cut)
            return args[0]
        if args and type(args[0]) is Part and func is Tensor.__setitem__:
            args[0].local = self.region.local(whole_args[0], args[0].cut)
        return result

    def _as_part(self, value: Any) -> Any:
        if type(value) is Parameter and hasattr(value, TAG):
            return make_part(value, getattr(value, TAG).cut, self.region.num_ranks)
        if type(value) in (list, tuple):
            return type(value)(map(self._as_part, value))
        return value

    def _whole(self, value: Any) -> Any:
        return self.region.whole(value) if isinstance(value, Tensor) else value


class TensorForward(CutForward):
    """Enter it around each forward of a cut model, and pass what comes out to `whole`.

    Every rank of the mesh must run the same forward. Under `torch.utils.checkpoint` give
    `context_fn=lambda: (nullcontext(), forward)`, since what is recomputed is computed outside.
    """

    def __init__(self, device_mesh: DeviceMesh | Group):
        """A mesh of one axis, or the group along that axis, which then counts the bytes."""
        if isinstance(device_mesh, DeviceMesh):
            device_mesh = Group(device_mesh.get_group())
        super().__init__(Region(device_mesh))

    def whole(self, value: Any) -> Any:
        """An output with its parts made whole; gradients flow back into the parts."""

        def gather(leaf: Any) -> Any:
            if type(leaf) is Part:
                return self.region.whole(leaf)
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
                return dataclasses.replace(leaf, **tree_map(gather, fields))
            return leaf

        return tree_map(gather, value)


def _local(value: Any) -> Any:
    return value.local if type(value) is Part else value


def has_part(values: Iterable[Any]) -> bool:
    for value in values:
        if type(value) is Part:
            return True
        if type(value) in (list, tuple) and has_part(value):
            return True
    return False


def follow_rule(rule: Rule, region: Region, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a rule for parts. Only some can have a whole value as their first argument."""
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    if rule not in _MIXED and type(args[0]) is not Part:
        raise Refused(f"a whole value and a part meet in {func.__name__}")
    return rule(region, func, args, kwargs)
