"""Torch's optimizers at their fastest, without asking and without changing what they compute.

`fuse` chooses the fused kernel where the recipe left the choice: one pass over the parameters,
three times as fast on a CPU. `stepper` calls an optimizer's step without the profiler record that
torch wraps it in, which costs more than the step of a small model; hooks and a running profiler
get what they are promised.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer, optimizer

_FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


_ELEMENT_WISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether each element is stepped on without a look at the others of its tensor.

    So it is with torch's, as far as they are known to; an optimizer of one's own may say so with an
    attribute, `element_wise = True`.
    """
    return type(optimizer) in _ELEMENT_WISE or getattr(optimizer, "element_wise", False) is True


def fuse(chosen: Optimizer) -> None:
    """Take the fused kernel, unless the recipe chose another or it does not apply."""
    if type(chosen) not in _FUSABLE:
        return
    for group in chosen.param_groups:
        decided = group.get("fused") is not None or group.get("foreach") is not None
        special = group.get("differentiable") or not all(
            p.is_floating_point() and not p.is_sparse for p in group["params"]
        )
        if not decided and not special:
            group["fused"] = True
            group["foreach"] = False


class Part(NamedTuple):
    """What stands in for a parameter, and how to take the same part of a tensor of its shape."""

    parameter: nn.Parameter
    take: Callable[[Tensor], Tensor]


def swap_parameters(
    chosen: Optimizer, parts_of: Callable[[nn.Parameter], Sequence[Part] | None]
) -> None:
    """Let an optimizer step on parts of its parameters; those of which there are None stay.

    Groups and their settings stay as the recipe made them. State that was made with the optimizer
    is cut as the parameters are.
    """
    for group in chosen.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        new: list[nn.Parameter] = []
        new_names: list[str] = []
        for name, old in zip(names, group["params"], strict=True):
            parts = parts_of(old)
            if parts is None:
                parts = [Part(old, lambda tensor: tensor)]
            else:
                state = chosen.state.pop(old, {})
                for part in parts if state else ():
                    chosen.state[part.parameter] = {
                        key: _cut_alike(value, old, part) for key, value in state.items()
                    }
            new += [part.parameter for part in parts]
            new_names += [name] * len(parts)
        group["params"] = new
        if "param_names" in group:
            group["param_names"] = new_names


def _cut_alike(value: Any, old: nn.Parameter, part: Part) -> Any:
    if isinstance(value, Tensor) and value.shape == old.shape and value.dim():
        return part.take(value).clone()
    return value.clone() if isinstance(value, Tensor) else value


def stepper(chosen: Optimizer) -> Callable[[], object]:
    """A function that does what `chosen.step()` does."""
    step = type(chosen).step
    inner = getattr(step, "__wrapped__", None)
    if inner is None or not getattr(step, "hooked", False) or "step" in vars(chosen):
        return chosen.step  # not wrapped by torch, or wrapped again by somebody else

    def bare_step() -> None:
        if _is_watched(chosen):
            chosen.step()
        else:
            inner(chosen)

    return bare_step


def _is_watched(chosen: Optimizer) -> bool:
    return bool(
        profiler._is_profiler_enabled
        or chosen._optimizer_step_pre_hooks
        or chosen._optimizer_step_post_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
    )
