"""Learning-rate schedules: a pure function of the step and the number of steps.

A schedule is `schedule(step, steps) -> factor`, with `step` counted from 0; each parameter
group's first learning rate is multiplied by the factor. One optimizer step is one step of the
schedule at every world size, and since nothing is counted along the way there is nothing to save:
a resumed run asks for the factor of the step it is at.

torch's own schedulers keep state: give one to `shoal.callbacks.TorchScheduler`, or use it in a loop
of your own. Warm-up rises linearly over the first `warmup` steps and is at 1 with the last of them.
Cost: under 1 us a step, no bytes. Papers: cosine arXiv:1608.03983, one-cycle arXiv:1708.07120.
Read next: `shoal.trainer`.
"""

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Schedule = Callable[[int, int], float]


def constant(warmup: int = 0) -> Schedule:
    """Warm up, then stay."""
    return _after_warmup(warmup, lambda progress: 1.0)


def linear(warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Warm up, then fall in a straight line towards `floor`, reached as the run ends."""
    _check_factor("floor", floor)
    return _after_warmup(warmup, lambda progress: 1.0 + (floor - 1.0) * progress)


def cosine(warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Warm up, then fall along half a cosine towards `floor`."""
    _check_factor("floor", floor)
    return _after_warmup(warmup, lambda progress: _cosine_between(1.0, floor, progress))


def one_cycle(peak_at: float = 0.3, start: float = 0.04, floor: float = 4e-6) -> Schedule:
    """Rise from `start` to 1 at the share `peak_at` of the run, then fall to `floor`.

    Both legs are half cosines, as in torch's OneCycleLR, whose `max_lr` is the group's own rate
    here. Momentum stays as it is.
    """
    if not 0.0 < peak_at < 1.0:
        raise UsageError(
            f"one_cycle(peak_at={peak_at}): the peak is a share of the run. Use 0 < peak_at < 1."
        )
    _check_factor("start", start)
    _check_factor("floor", floor)

    def factor(step: int, steps: int) -> float:
        peak, end = max(peak_at * steps - 1, 0.0), max(steps - 1, 1)
        if step < peak:
            return _cosine_between(start, 1.0, step / peak)
        return _cosine_between(1.0, floor, min((step - peak) / (end - peak), 1.0))

    return factor


def as_schedule(function: Callable[..., Any]) -> Schedule:
    """A schedule from any function of `(step)` or `(step, steps)`; its signature is read once.

    Parameters with defaults keep them, but for a second one that is named `steps`.
    """
    _refuse_scheduler(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise _not_a_schedule(function, "its signature cannot be read") from None
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [p.name for p in positional if p.default is p.empty]
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise _not_a_schedule(function, f"it needs the keyword {parameter.name!r}")
    if len(required) > 2 or not positional:
        needs = ", ".join(required) or "no positional argument"
        raise _not_a_schedule(function, f"it takes {needs}")
    wants_steps = len(required) == 2 or (len(positional) > 1 and positional[1].name == "steps")
    if wants_steps:
        return function

    def of_step(step: int, steps: int) -> float:
        factor: float = function(step)
        return factor

    return of_step


def _refuse_scheduler(function: Callable[..., Any]) -> None:
    """A scheduler of torch, or a function that makes one of an optimizer, is no schedule."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return
    kinds = function.__mro__ if isinstance(function, type) else type(function).__mro__
    is_made = any(kind.__name__ == "LRScheduler" for kind in kinds)
    if is_made or first in ("optimizer", "opt", "optim"):
        raise UsageError(
            f"schedule={name}: a scheduler of torch keeps state and changes an optimizer, and a "
            "schedule is a function of (step, steps) that returns a factor. Write "
            "callbacks=[shoal.callbacks.TorchScheduler(lambda optimizer: "
            "CosineAnnealingLR(optimizer, 100))] instead; for ReduceLROnPlateau add metric='loss'."
        )


def remember_rates(optimizer: "Optimizer") -> None:
    """Record each group's learning rate, once, as what factors are multiplied with.

    Under torch's own name `initial_lr`, which travels in the optimizer's state: groups that have it
    (a loaded state) keep it.
    """
    for index, group in enumerate(optimizer.param_groups):
        if group.get("lr") is None:
            raise UsageError(
                f"Parameter group {index} of {type(optimizer).__name__} has no learning rate. "
                "A schedule multiplies it; give the optimizer an lr, or the run no schedule."
            )
        group.setdefault("initial_lr", float(group["lr"]))


def apply(optimizer: "Optimizer", factor: float) -> None:
    """Set each group's learning rate; call `remember_rates` before the first time."""
    if not 0.0 <= factor < math.inf:  # false for NaN too
        raise RecipeError(
            f"The schedule gave the factor {factor}. A learning rate is multiplied with it, so it "
            "must be a finite number, 0 or more; look at the recipe's schedule."
        )
    for group in optimizer.param_groups:
        rate = group["lr"]
        if isinstance(rate, (float, int)):
            group["lr"] = group["initial_lr"] * factor
        else:  # a tensor, which captured or compiled steps read in place
            rate.fill_(group["initial_lr"] * factor)


def _after_warmup(warmup: int, decay: Callable[[float], float]) -> Schedule:
    """`decay` over the share of the run that comes after the warm-up."""
    if warmup < 0 or warmup != int(warmup):
        raise UsageError(f"warmup={warmup}: the warm-up is a number of steps. Use 0, 1, 2, ...")

    def factor(step: int, steps: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return decay(min((step - warmup) / max(steps - warmup, 1), 1.0))

    return factor


def _cosine_between(first: float, last: float, progress: float) -> float:
    return last + (first - last) * (1.0 + math.cos(math.pi * progress)) / 2.0


def _check_factor(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UsageError(
            f"{name}={value}: it is a share of the learning rate. Use a number from 0 to 1."
        )


def _not_a_schedule(function: object, why: str) -> UsageError:
    name = getattr(function, "__qualname__", None) or repr(function)
    return UsageError(
        f"{name} is not a schedule: {why}. A schedule is a function of (step) or (step, steps) "
        "that returns the factor of the learning rate, such as shoal.numerics.schedules.cosine()."
    )
