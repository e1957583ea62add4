"""Torch's fused Adam, AdamW and SGD on runs of elements whose state stands where the caller says.

An optimizer object steps on whole parameters and keeps state of its own. Where several processes
step on parts of one state (`sync/host_state.py`), the same kernels are called here on any run of
elements, with the settings of the group at hand, so that the bits are those of `optimizer.step()`.
A run begins at a multiple of 16 elements of its parameter and ends at one, or with it: the kernels
treat the rest of a vector apart. Read next: `optimizers.py`, which chooses fused kernels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.numerics.optimizers import has_hooks, members_of

_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_MOMENTS, _MOMENTUM, _STEP = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",), "step"


class StepGroup(NamedTuple):
    """One group of parameters, and the optimizer whose settings it has."""

    member: Optimizer
    group: dict[str, Any]

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the state that is as large as the parameter."""
        if isinstance(self.member, torch.optim.SGD):
            return _MOMENTUM if self.group["momentum"] else ()
        return _MOMENTS

    @property
    def counts(self) -> bool:
        """Whether each parameter counts its steps."""
        return isinstance(self.member, _ADAM)

    def step(self, runs: "Runs", is_first: bool) -> None:
        """Step on some runs of elements; of SGD `is_first` says whether there is no momentum yet.

        The counts of Adam are those after this step.
        """
        group, sgd = self.group, isinstance(self.member, torch.optim.SGD)
        settings = {key: group[key] for key in ("lr", "weight_decay", "maximize")}
        if sgd:
            settings |= {key: group[key] for key in ("momentum", "dampening", "nesterov")}
            torch._fused_sgd_(
                runs.parameters,
                runs.gradients,
                runs.state[0] if runs.state else [],
                is_first_step=is_first,
                **settings,
            )
            return
        is_adamw = isinstance(self.member, torch.optim.AdamW)
        decays_apart = group.get("decoupled_weight_decay", is_adamw)
        kernel = torch._fused_adamw_ if decays_apart else torch._fused_adam_
        beta1, beta2 = group["betas"]
        settings |= {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "amsgrad": False}
        means, squares = runs.state
        kernel(runs.parameters, runs.gradients, means, squares, [], runs.counts, **settings)


class Runs(NamedTuple):
    """Elements of several parameters, in equal lists."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: list[list[Tensor]]  # by key
    counts: list[Tensor]  # of steps


def step_groups(chosen: Optimizer) -> dict[nn.Parameter, StepGroup]:
    """The group of each parameter that the optimizer steps on."""
    return {
        p: found
        for member in members_of(chosen)
        for group in member.param_groups
        for found in [StepGroup(member, group)]
        for p in group["params"]
    }


def begin_count(state: dict[str, Any]) -> None:
    """Of a parameter that steps for the first time, as torch begins it."""
    state[_STEP] = torch.zeros((), dtype=torch.float32)


def count_of(state: dict[str, Any]) -> Tensor:
    found: Tensor = state[_STEP]
    return found


def why_not_in_runs(chosen: Optimizer) -> str:
    """Why an optimizer cannot step on runs of elements here, in words; empty if it can."""
    if names := [type(m).__name__ for m in members_of(chosen) if type(m) not in _KNOWN]:
        return f"{names[0]} is none of Adam, AdamW and SGD"
    if has_hooks(chosen) or any("step" in vars(member) for member in members_of(chosen)):
        return "the step of its optimizer has hooks, or was replaced"
    for _, group in step_groups(chosen).values():
        if not group.get("fused") or group.get("amsgrad") or group.get("differentiable"):
            what = "amsgrad" if group.get("amsgrad") else "a kernel that is not fused"
            return f"its optimizer has {what}"
        if any(isinstance(value, Tensor) for key, value in group.items() if key != "params"):
            return "a setting of its optimizer is a tensor"
    return ""


_KNOWN = (*_ADAM, torch.optim.SGD)
