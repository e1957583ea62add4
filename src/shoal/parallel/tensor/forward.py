"""Runs the forward pass of a model whose matrices are cut.

A `TensorForward` is entered around each forward. It sees every torch function; those that meet a
cut parameter or a part go to a rule (`matmul_rules.py`, `elementwise_rules.py`, `view_rules.py`),
all others run as they are. A function without a rule, or an autograd function of the model's own,
is given whole values instead, gathered from all ranks, and what comes out is cut again: slower,
never wrong. So the result does not depend on which matrices were cut.

Parameters stay plain and local. What they are a part of is an attribute (`part.TAG`),
because FSDP puts other parameter objects into a module for the time of its forward.

Cost: about a microsecond for a function that meets nothing cut.
"""

import dataclasses
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shoal.comm.collectives import Group
from shoal.errors import RecipeError
from shoal.parallel.layout import Cut
from shoal.parallel.tensor.elementwise_rules import ELEMENT_RULES, cast, made_whole, pointwise
from shoal.parallel.tensor.matmul_rules import MATRIX_RULES
from shoal.parallel.tensor.part import (
    METADATA_FUNCTIONS,
    TAG,
    CannotCut,
    CutRegion,
    TensorPart,
    answer_metadata,
    make_part,
    strides_of_whole,
)
from shoal.parallel.tensor.view_rules import (
    SHAPE_RULES,
    Args,
    Kwargs,
    Rule,
    cat,
    expand_as,
    pick_along,
    setitem,
    stack,
    view_as,
)

# Rules that want a part as an argument.
PART_RULES: dict[Any, Rule] = {
    **ELEMENT_RULES,
    **SHAPE_RULES,
    Tensor.data.__get__: pointwise,  # type: ignore[attr-defined]
}
_MIXED = {pointwise, cast, made_whole, cat, stack, expand_as, view_as, pick_along, setitem}
# Of a rule. Others pass: that the group is lost, or that enough has been computed again.
_FAILURES = (
    *(RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError),
    RecipeError,  # of a part that was given to torch itself
)
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


DECOMPOSED = {F.multi_head_attention_forward: _opened(F.multi_head_attention_forward)}


def holds_cut(values: Any) -> bool:
    """Whether a cut parameter is among some arguments, or a part that torch did not look for."""
    for value in values:
        kind = type(value)
        if kind is Parameter:
            if hasattr(value, TAG):
                return True
        elif kind is TensorPart or ((kind is list or kind is tuple) and holds_cut(value)):
            return True
    return False


class CutForward(TorchFunctionMode):
    """Dispatches torch functions to rules; the region creates and gathers parts."""

    def __init__(self, region: CutRegion):
        super().__init__()
        self.region = region
        self._depth = 0

    def __enter__(self) -> Self:
        if not self._depth:
            self._apply = Function.__dict__["apply"]
            Function.apply = classmethod(self._watched_apply)  # type: ignore[assignment,method-assign]
        self._depth += 1
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            Function.apply = self._apply  # type: ignore[method-assign]
            self.region.forget()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _watched_apply(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """An autograd function of the model's own, of which torch tells no mode."""
        apply = self._apply.__get__(None, cls)
        if not holds_cut((*args, *kwargs.values())):
            return apply(*args, **kwargs)
        return self.on_whole_values(apply, args, kwargs, cuts_again=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs:
            if not types and not holds_cut(args):
                return func(*args)
            return self.dispatch(func, args, {})
        if not types and not holds_cut(args) and not holds_cut(kwargs.values()):
            return func(*args, **kwargs)
        return self.dispatch(func, args, kwargs)

    def dispatch(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """A function that is given something cut, or a tensor of a foreign class."""
        cuts_again = True
        for value in args:
            if type(value) is TensorPart and value.viewed is not None:
                _check_views(value)
        try:
            rule = MATRIX_RULES.get(func)
            if rule is not None:
                return rule(self.region, func, args, kwargs)
            if func in _OWN:
                return func(*map(_local, args), **kwargs)
            if func in DECOMPOSED:
                with self:
                    return DECOMPOSED[func](*args, **kwargs)
            cut_args = tuple(map(self._as_part, args))
            if func in METADATA_FUNCTIONS and type(cut_args[0]) is TensorPart:
                return answer_metadata(func, cut_args, kwargs)
            rule = PART_RULES.get(func)
            cut_kwargs = {name: self._as_part(value) for name, value in kwargs.items()}
            if rule is not None and has_part((*cut_args, *cut_kwargs.values())):
                return follow_rule(rule, self.region, func, cut_args, cut_kwargs)
        except CannotCut as refused:
            cuts_again = refused.gathers
        except _FAILURES:
            # A use of the function that the rule does not know. If it is the model that is wrong,
            # it fails again on whole values, in its own terms.
            pass
        return self.on_whole_values(func, args, kwargs, cuts_again)

    def on_whole_values(self, func: Any, args: Args, kwargs: Kwargs, cuts_again: bool) -> Any:
        """The way that is always right: gather, then compute as the uncut model does.

        What comes out stays whole, or is cut as what went in was, where it has such a dim.
        """
        gathered: dict[int, tuple[TensorPart, Tensor, int]] = {}
        parameters: list[tuple[Parameter, Tensor, int]] = []

        def whole(value: Any) -> Any:
            if type(value) is not TensorPart:
                made = self.region.whole(value) if isinstance(value, Tensor) else value
                if made is not value and type(value) is Parameter and not made.is_inference():
                    parameters.append((value, made, made._version))
                return made
            if id(value) not in gathered:
                made = self.region.whole(value)
                if func in _LAYS_OUT:
                    made = _laid_out(made, value)
                gathered[id(value)] = value, made, 0 if made.is_inference() else made._version
            return gathered[id(value)][1]

        whole_args, whole_kwargs = tree_map(whole, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        for part, made, version in gathered.values():
            if made.is_inference() or made._version != version:
                self._write(part, made)
        for p, made, version in parameters:
            if made._version != version:
                with torch._C.DisableTorchFunction():
                    p.copy_(self.region.local(made, getattr(p, TAG).cut))
        if not gathered:
            return result
        written = {id(made): part for part, made, _ in gathered.values()}
        like = next(iter(gathered.values()))[0] if cuts_again else None
        return tree_map(lambda leaf: self._returned(leaf, written, like), result)

    def _returned(self, leaf: Any, written: dict[int, TensorPart], like: TensorPart | None) -> Any:
        """The result of a function on whole values, as the model gets it: cut again, or whole."""
        if id(leaf) in written:
            return written[id(leaf)]
        if not isinstance(leaf, Tensor) or type(leaf) is TensorPart:
            return leaf
        base = written.get(id(leaf._base)) if leaf._is_view() else None
        cut = None if like is None else _cut_like(leaf, like, self.region.num_ranks)
        if cut is not None:
            part = self.region.cut_again(leaf, cut)
            if base is not None:
                part.is_apart = True
                base.has_copy(part)
            return part
        if base is not None and leaf._base is not None and not leaf.is_inference():
            base.viewed = leaf._base, leaf._version
            base.has_copy(leaf)
        return leaf

    def _write(self, part: TensorPart, whole: Tensor) -> None:
        """A function wrote into the whole that was made of a part."""
        try:
            part.check_write()
        except CannotCut:
            raise _written_through_view() from None
        if whole.shape != part.shape:
            raise _written_through_view()
        share = self.region.local(whole, part.cut)
        if part.local.is_leaf and part.local.requires_grad:
            part.local = share
        else:
            part.local.copy_(share)  # in place, since others may be views of it
        part.viewed = None

    def _as_part(self, value: Any) -> Any:
        if type(value) is Parameter and hasattr(value, TAG):
            return make_part(value, getattr(value, TAG).cut, self.region.num_ranks)
        if type(value) in (list, tuple):
            return type(value)(map(self._as_part, value))
        return value


class TensorForward(CutForward):
    """Enter it around each forward of a cut model, and pass what comes out to `whole`.

    Every rank of the mesh must run the same forward. Under `torch.utils.checkpoint` give
    `context_fn=lambda: (nullcontext(), forward)`, since what is recomputed is computed outside.
    """

    def __init__(self, device_mesh: DeviceMesh | Group):
        """A mesh of one axis, or the group along that axis, which then counts the bytes."""
        if isinstance(device_mesh, DeviceMesh):
            device_mesh = Group(device_mesh.get_group())
        super().__init__(CutRegion(device_mesh))

    def whole(self, value: Any) -> Any:
        """An output with its parts made whole; gradients flow back into the parts."""

        return tree_map(self._whole, value)

    def _whole(self, leaf: Any) -> Any:
        if type(leaf) is TensorPart:
            _check_views(leaf)
            return self.region.whole(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
            return dataclasses.replace(leaf, **self.whole(fields))
        return leaf


_LAYS_OUT = {torch.as_strided, Tensor.as_strided}  # that see how a value lies in memory


def _laid_out(whole: Tensor, part: TensorPart) -> Tensor:
    """A gathered value as it would lie in memory if it had never been cut."""
    order = sorted(range(part.ndim), key=lambda dim: -strides_of_whole(part)[dim])
    back = [order.index(dim) for dim in range(part.ndim)]
    return whole.permute(order).contiguous().permute(back)


def _check_views(part: TensorPart) -> None:
    """What was written through a view of a copy is missing in the part itself."""
    if part.viewed is not None and part.viewed[0]._version != part.viewed[1]:
        raise _written_through_view()


def _written_through_view() -> RecipeError:
    return RecipeError(
        "The model writes in place through a view of a value of which each rank of the tensor axis "
        "holds a part, or into one that has such views, or changes its shape in place. Such writes "
        "do not reach the other. "
        "Use a function that returns a new tensor, or leave the matrices before it whole with "
        'cuts={"module": "whole"} in the Run.'
    )


def _cut_like(value: Tensor, part: TensorPart, num_ranks: int) -> Cut | None:
    """Along which dim a value that was computed from a part is cut again. Pure."""
    size, (dim, packs) = part.shape[part.cut.dim], part.cut
    if value.ndim < min(part.ndim, 2):
        return None
    same = [at for at in range(value.ndim) if value.shape[at] == size]
    for at in (dim if value.ndim == part.ndim else -1, value.ndim + dim - part.ndim, dim, *same):
        if at in same:
            return Cut(at, packs)
    is_shared = value.ndim == part.ndim and value.shape[dim] % num_ranks == 0
    return Cut(dim) if is_shared and value.shape[dim] else None


def _local(value: Any) -> Any:
    return value.local if type(value) is TensorPart else value


def has_part(values: Iterable[Any]) -> bool:
    for value in values:
        if type(value) is TensorPart:
            return True
        if type(value) in (list, tuple) and has_part(value):
            return True
    return False


def follow_rule(rule: Rule, region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a rule for parts. Only some can have a whole value as their first argument."""
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    if rule not in _MIXED and type(args[0]) is not TensorPart:
        raise CannotCut(f"a whole value and a part meet in {func.__name__}")
    return rule(region, func, args, kwargs)
