"""Placeholders for tensors of other ranks: they have shape and dtype, and raise when computed with.

A stage keeps the names, shapes and types of all parameters and of the values that it skips, so that
the model's own code runs as it is. `RemoteParameter` stands for a parameter, `Placeholder` for a
value. While a stage or the loss runs (`in_use_by`), any operation on one raises with its name,
however it was come by: as an argument, an attribute, a default or a closure. At other times they
are zeros or NaN of their form. Cost: nothing for other tensors.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.pipeline.calls import leaves, torch_call
from shoal.parallel.pipeline.tape import Path, TapeValue


class _User(threading.local):
    name = ""  # of what runs in this thread; empty if absent tensors may be looked at


_user = _User()


@contextmanager
def in_use_by(name: str) -> Iterator[None]:
    """Let every operation on an absent tensor raise; `name` says who would have used it."""
    before, _user.name = _user.name, name
    try:
        yield
    finally:
        _user.name = before


class AbsentTensor(Tensor):
    """Not to be computed with while a stage runs."""

    absent = ""  # what it stands for

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _user.name and torch_call(func).is_event:
            raise _refusal(leaves((args, kwargs), []))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Placeholder(AbsentTensor):
    """For a value that another stage makes and this one does not receive."""


class RemoteParameter(AbsentTensor, nn.Parameter):
    """A parameter that only other ranks' stages use."""


class AbsentObject:
    """For an object, such as a cache, that another stage made or filled: it raises when used."""

    def __init__(self, kind: type):
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        kind = object.__getattribute__(self, "_kind")
        if name == "__class__":  # so that code which asks for its kind takes the same path
            return kind
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise _refusal([], f"a {kind.__name__}")


def without_partial(output: Any, paths: Collection[Path]) -> Any:
    """An output with `AbsentObject` in the place of the objects at these paths."""
    for path in paths:
        output = _replaced(output, path)
    return output


def _replaced(tree: Any, path: Path) -> Any:
    if not path:
        return tree if type(tree) is AbsentObject else AbsentObject(type(tree))
    key, *rest = path
    item = _replaced(tree[key], tuple(rest))
    if isinstance(tree, tuple):
        items = [*tree[:key], item, *tree[key + 1 :]]
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)
    tree[key] = item
    return tree


def make_placeholder(value: TapeValue, number: int) -> Tensor:
    """A tensor of this form without memory. Not a number where it can be: misuse shows."""
    wrong = float("nan") if value.dtype.is_floating_point or value.dtype.is_complex else 0
    plain = torch.full((), wrong, dtype=value.dtype, device=value.device).expand(value.shape)
    made = plain.as_subclass(Placeholder)
    made.absent = f"value {number}"
    return made


def drop_unowned(model: nn.Module, owned: Collection[str]) -> None:
    """Free the memory of all parameters but the owned. Names, shapes and types stay.

    In place: a closure or another object that holds a parameter must not use its old values.
    """
    for name, parameter in model.named_parameters():
        if name in owned:
            continue
        trained = parameter.requires_grad
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        parameter.requires_grad_(False)
        parameter.grad = None
        parameter.data = nothing.expand(parameter.shape)
        parameter.__class__ = RemoteParameter
        parameter.absent = f"the parameter {name}"  # type: ignore[attr-defined]
        parameter.trained_elsewhere = trained  # type: ignore[attr-defined]


def _refusal(items: list[Any], what: str = "a value") -> PlanError:
    what = next((x.absent for x in items if isinstance(x, AbsentTensor)), what)
    who = _user.name or "The program"
    return PlanError(
        f"{who} uses {what}, which is on another rank: it did not when the forward was recorded, "
        "on the first batches. What a stage uses must not depend on data, and the loss "
        "may use the model's output alone. Hand it to a submodule that uses it for all data, or "
        "leave out pipeline."
    )
