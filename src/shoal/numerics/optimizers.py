"""Torch's optimizers at their fastest, without asking and without changing what they compute.

`use_fused_kernels` chooses the fused kernel where the recipe left the choice: one pass over the
parameters, three times as fast on a CPU. `stepper` calls an optimizer's step without the profiler
record that torch wraps it in, which costs more than the step of a small model; with hooks or a
running profiler torch's own step runs. Read next: `optimizer_checks.py`, what optimizers of users
may not do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer, optimizer

from shoal.errors import RecipeError, UsageError
from shoal.numerics.optimizer_checks import (
    HiddenState,
    closure_message,
    failed_for_closure,
    needs_closure,
    warn_of_kept_parameters,
)

_FUSABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


_ELEMENT_WISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)


class Optimizers(Optimizer):
    """One optimizer made of several, each with parameters of its own.

        shoal.Optimizers(torch.optim.AdamW(layers), shoal.RowwiseAdagrad(tables, lr=0.05))
        shoal.Optimizers(generator=torch.optim.Adam(a), discriminator=torch.optim.Adam(b))

    State and groups are its own, the members' in their order; a member only steps on them. Those
    with names can be stepped apart, by `batch.minimize(loss, of="generator")` in a `Run(step=...)`.
    """

    def __init__(self, *members: Optimizer, **named: Optimizer):
        every = (*members, *named.values())
        if not every or not all(isinstance(member, Optimizer) for member in every):
            raise UsageError("Optimizers wants torch optimizers: Optimizers(AdamW(a), SGD(b)).")
        groups = [group for member in every for group in member.param_groups]
        if not all("param_names" in group for group in groups):  # torch wants all or none
            for group in groups:
                group.pop("param_names", None)
        super().__init__(groups, {})
        self.members, self.names = every, tuple(named)
        self._counts = [len(member.param_groups) for member in every]
        self._numbers: Sequence[int] = range(len(every))  # of the members that a step is of
        for member in every:
            self.state.update(member.state)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for number in self._numbers:
            member, groups = self.members[number], self._groups_of(number)
            member.state, member.param_groups = self.state, groups
            _bare(member)()

    @contextmanager
    def only(self, names: Collection[str]) -> Iterator[None]:
        """In this block a step is one of the members with these names alone."""
        before, self._numbers = self._numbers, [self._number(name) for name in names]
        try:
            yield
        finally:
            self._numbers = before

    def parameters_of(self, names: Collection[str]) -> list[nn.Parameter]:
        """What the members with these names step on."""
        groups = [group for name in names for group in self._groups_of(self._number(name))]
        return [p for group in groups for p in group["params"]]

    def _number(self, name: str) -> int:
        return len(self.members) - len(self.names) + self.names.index(name)

    def _groups_of(self, number: int) -> list[dict[str, Any]]:
        first = sum(self._counts[:number])
        return self.param_groups[first : first + self._counts[number]]


def names_in(chosen: Optimizer) -> tuple[str, ...]:
    """The names that a recipe gave to parts of its optimizer."""
    return chosen.names if isinstance(chosen, Optimizers) else ()


def stepping_only(chosen: Optimizer, names: Collection[str]) -> AbstractContextManager[None]:
    """In this block a step is one of the named parts; of all of it if no names are given."""
    if not names:
        return nullcontext()
    assert isinstance(chosen, Optimizers), "only Optimizers has names"
    return chosen.only(names)


def members_of(chosen: Optimizer) -> Sequence[Optimizer]:
    return chosen.members if isinstance(chosen, Optimizers) else (chosen,)


def _groups(chosen: Optimizer) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    for member in members_of(chosen):
        yield from ((member, group) for group in member.param_groups)


def kind_of(chosen: Optimizer) -> str:
    """The name that identifies the optimizer of a saved state."""
    name = type(chosen).__name__
    if not isinstance(chosen, Optimizers):
        return name
    return f"{name}({', '.join(type(member).__name__ for member in chosen.members)})"


def is_element_wise(optimizer: Optimizer, but_for: Collection[Tensor] = ()) -> bool:
    """Whether the step of an element does not depend on other elements of its tensor.

    So it is with torch's, as far as they are known to; an optimizer of one's own may say so with an
    attribute, `element_wise = True`. Parameters in `but_for` do not count.
    """
    return all(
        type(member) in _ELEMENT_WISE or getattr(member, "element_wise", False) is True
        for member, group in _groups(optimizer)
        if any(p not in but_for for p in group["params"])
    )


def use_fused_kernels(chosen: Optimizer, sparse: Collection[Tensor] = ()) -> None:
    """Take the fused kernel, unless the recipe chose another or it does not apply.

    It takes no gradients that are `sparse`, and on a CPU it pairs elements by where they stand in
    memory: right only for parameters that lie as their gradients do. So one that a recipe asks for
    is given up, too, if parameters lie otherwise (channels_last, transposed).
    """
    for member, group in _groups(chosen):
        if type(member) not in _FUSABLE:
            continue
        if not all(p.is_contiguous() for p in group["params"]):
            group["fused"] = False
            continue
        decided = group.get("fused") is not None or group.get("foreach") is not None
        special = group.get("differentiable") or not all(
            p.is_floating_point() and p not in sparse for p in group["params"]
        )
        if not decided and not special:
            group["fused"] = True
            group["foreach"] = False


def begin_momentum(chosen: Optimizer) -> None:
    """Let parameters that were not trained before step beside others: torch's fused SGD wants a
    momentum of all or of none. One of 0 makes their first step what a first step is; not so with
    dampening, where the fused kernel is given up."""
    for member, group in _groups(chosen):
        if type(member) is not torch.optim.SGD or not group["momentum"] or not group.get("fused"):
            continue
        new = [p for p in group["params"] if member.state.get(p, {}).get(_MOMENTUM) is None]
        if group["dampening"]:
            group["fused"] = False
        elif len(new) < len(group["params"]):
            for p in new:
                member.state[p][_MOMENTUM] = torch.zeros_like(p)


_MOMENTUM = "momentum_buffer"
_DENSE_ONLY = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.ASGD, torch.optim.Adafactor),
)


def unfit_for_rows(chosen: Optimizer, table: Tensor) -> str:
    """Why an optimizer cannot step on some rows of a table alone, in words; empty if it can."""
    for member, group in _groups(chosen):
        if not any(p is table for p in group["params"]):
            continue
        if isinstance(member, _DENSE_ONLY):
            return f"{type(member).__name__} takes dense gradients only"
        for key in ("momentum", "weight_decay"):
            if group.get(key):
                return f"{key}={group[key]} of its optimizer changes rows that were not looked up"
        if group.get("fused"):
            return "the fused kernel of its optimizer takes dense gradients only"
    return ""


def scale_rates(chosen: Optimizer, factor_of: Mapping[nn.Parameter, float]) -> Optimizer:
    """The optimizer with the learning rate of some parameters multiplied, which takes new groups.

    Groups of the recipe are split; those with the largest factor come first. To be called before
    the first step: what it returns has the members of one that is made of several.
    """
    for member in members_of(chosen):
        split = [part for group in member.param_groups for part in _split(group, factor_of)]
        member.param_groups[:] = split
    if not isinstance(chosen, Optimizers):
        return chosen
    first = len(chosen.members) - len(chosen.names)
    return Optimizers(*chosen.members[:first], **dict(zip(chosen.names, chosen.members[first:])))


def _split(
    group: dict[str, Any], factor_of: Mapping[nn.Parameter, float]
) -> Iterator[dict[str, Any]]:
    """A group for each factor among the parameters of one."""
    factors = [factor_of.get(p, 1.0) for p in group["params"]]
    for factor in sorted(set(factors) or {1.0}, reverse=True):
        part = dict(group)
        for key in ("params", "param_names"):
            if key in group:
                part[key] = [one for one, own in zip(group[key], factors) if own == factor]
        if factor != 1:
            part["lr"] = _scaled_rate(group.get("lr"), factor)
            if "initial_lr" in group:
                part["initial_lr"] = _scaled_rate(group["initial_lr"], factor)
        yield part


def _scaled_rate(rate: Any, factor: float) -> Any:
    if rate is None:
        raise RecipeError(
            "The optimizer has no learning rate that a factor could change. Give it an lr, or "
            "leave rates and layer_decay out."
        )
    return rate * factor


class ParameterPart(NamedTuple):
    """A part that replaces a parameter, and how to take that part of a tensor of its shape."""

    parameter: nn.Parameter
    take: Callable[[Tensor], Tensor]


def swap_parameters(
    chosen: Optimizer, parts_of: Callable[[nn.Parameter], Sequence[ParameterPart] | None]
) -> None:
    """Let an optimizer step on parts of its parameters; those of which there are None stay.

    Groups and their settings stay as the recipe made them. State that was made with the optimizer
    is cut as the parameters are. That it keeps the old ones elsewhere, too, is warned of.
    """
    old = {id(p) for group in chosen.param_groups for p in group["params"]}
    put_parts(chosen, parts_of)
    replaced = old - {id(p) for group in chosen.param_groups for p in group["params"]}
    for member in members_of(chosen):
        warn_of_kept_parameters(member, replaced)


def put_parts(
    chosen: Optimizer, parts_of: Callable[[nn.Parameter], Sequence[ParameterPart] | None]
) -> None:
    """The same without warnings, for an optimizer that is only tried."""
    for group in chosen.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        new: list[nn.Parameter] = []
        new_names: list[str] = []
        for name, old in zip(names, group["params"], strict=True):
            parts = parts_of(old)
            if parts is None:
                parts = [ParameterPart(old, lambda tensor: tensor)]
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


def _cut_alike(value: Any, old: nn.Parameter, part: ParameterPart) -> Any:
    if isinstance(value, Tensor) and value.shape == old.shape and value.dim():
        return part.take(value).clone()
    return value.clone() if isinstance(value, Tensor) else value


def refuse_closures(chosen: Optimizer) -> None:
    """RecipeError if a step is known to want one: no plan can compute a batch's loss again."""
    for member in members_of(chosen):
        if needs_closure(member):
            raise RecipeError(closure_message(member))


def stepper(chosen: Optimizer) -> Callable[[], object]:
    """A function that does what `chosen.step()` does."""
    step, hidden = _bare(chosen), [HiddenState(member) for member in members_of(chosen)]

    def careful_step() -> None:
        try:
            step()
        except Exception as error:
            if failed_for_closure(error):
                raise RecipeError(closure_message(chosen, error)) from None
            raise
        if hidden:
            hidden[:] = [member for member in hidden if member.check()]

    return careful_step


def _bare(chosen: Optimizer) -> Callable[[], object]:
    step = type(chosen).step
    inner = getattr(step, "__wrapped__", None)
    if inner is None or not getattr(step, "hooked", False) or "step" in vars(chosen):
        return chosen.step  # not wrapped by torch, or wrapped again

    hooks = _hooks_of(chosen)

    def bare_step() -> None:
        if profiler._is_profiler_enabled or any(hooks):
            chosen.step()
        else:
            inner(chosen)

    return bare_step


def has_hooks(chosen: Optimizer) -> bool:
    """Whether torch calls anything before or after its step."""
    return any(_hooks_of(chosen))


def _hooks_of(chosen: Optimizer) -> list[Mapping[int, Callable[..., Any]]]:
    """Where torch keeps what it calls before and after a step."""
    found: list[Any] = [
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    ]
    for each in dict.fromkeys([chosen, *members_of(chosen)]):
        found += [each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks]
    return found
