"""Checks of optimizers that are not torch's: closures, hidden state, kept parameters.

A step that evaluates the loss itself, by a closure, cannot be distributed: the batch is on many
ranks. A number that a step changes and that is not in `state_dict()` is in no checkpoint, and the
rank or server that replaces a dead one does not get it; `HiddenState` finds it by comparing
attributes after two steps. An optimizer that keeps parameters in attributes would step on the wrong
ones where a plan gives it parts of them. Lists and dicts are searched, other objects are not.
"""

import inspect
import traceback
from collections import deque
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.logs import warn_once

_KNOWN = ("state", "param_groups", "defaults")  # in the state, or constant
_DEPTH = 3  # of lists in lists that are looked into


def needs_closure(chosen: Optimizer) -> bool:
    """Whether a step cannot be called without one."""
    parameters = inspect.signature(chosen.step).parameters.values()
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(p.default is p.empty and p.kind not in variable for p in parameters)


def failed_for_closure(error: Exception) -> bool:
    """Whether a step failed because there was no closure: by its words, or the line it was at."""
    said, lines = str(error), [f.line or "" for f in traceback.extract_tb(error.__traceback__)]
    looked_at = lines if "'NoneType' object is not callable" in said else lines[-1:]
    return any("closure" in words for words in (said, *looked_at))


def closure_message(chosen: Optimizer, error: Exception | None = None) -> str:
    found = "" if error is None else f" ({type(error).__name__}: {error})"
    return (
        f"The step of {type(chosen).__name__} wants a closure that evaluates the loss, which no "
        f"plan can spread{found}. Use an optimizer that steps on gradients alone."
    )


class HiddenState:
    """Finds attributes that an optimizer's steps change, besides its state."""

    def __init__(self, chosen: Optimizer):
        self._chosen = chosen
        self._before: dict[str, Any] | None = None

    def check(self) -> bool:
        """Call after a step; returns whether to call it again: the first step may create some."""
        own = {n: _trace(v, _DEPTH) for n, v in vars(self._chosen).items() if n not in _KNOWN}
        before, self._before = self._before, own
        if before is None:
            return True
        names = [name for name in own if name in before and own[name] != before[name]]
        if names:
            warn_once(_in_words(self._chosen, names), on_screen=True)
        return False


def warn_of_kept_parameters(chosen: Optimizer, replaced: Collection[int]) -> None:
    """Warn if an optimizer keeps parameters that were replaced, given by `id`, in attributes."""
    own = vars(chosen).items()
    names = [n for n, value in own if n not in _KNOWN and _holds(value, replaced, _DEPTH)]
    if names:
        kind = type(chosen).__name__
        warn_once(
            f"{kind} keeps parameters in {', '.join(names)}, and under this plan it is to step on "
            "others, those in its param_groups. If its step looks for them elsewhere, it changes "
            "nothing: let it go through self.param_groups. `shoal verify` tells.",
            on_screen=True,
        )


def _holds(value: Any, replaced: Collection[int], depth: int) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | deque) and depth:
        return any(_holds(one, replaced, depth - 1) for one in value)
    return id(value) in replaced


def _in_words(chosen: Optimizer, names: list[str]) -> str:
    kind = type(chosen).__name__
    return (
        f"The step of {kind} changes {', '.join(names)}, which is not in its state or its groups: "
        "no checkpoint has it, nor does the rank or server that replaces a dead one. If later "
        "steps depend on it, keep it in the optimizer's state or param_groups."
    )


def _trace(value: Any, depth: int) -> Any:
    """A value that differs if a number has changed, without a copy of tensors."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return (id(value), None if value.is_inference() else value._version)
    if isinstance(value, bool | int | float | complex | str):
        return repr(value)  # in which NaN is like NaN
    if isinstance(value, dict):
        return _trace(list(value.values()), depth)
    if isinstance(value, list | tuple | deque) and depth:
        return [_trace(one, depth - 1) for one in value]
    return None
