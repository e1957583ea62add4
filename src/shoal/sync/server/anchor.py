"""What servers hold of local steps: the anchor, and the outer optimizer that moves it.

The anchor is the weights as of the last agreement, in the form of a model, so that whatever trains
a model through servers trains it too: its gradient is what a replica's weights have moved away from
it, and it moves by `outer_step` of `sync/outer.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.parallel.layout import Slice
from shoal.plans.plan import Plan
from shoal.sync.outer import ANCHOR, MOMENTUM, OuterConfig, averaged_parameters, outer_step
from shoal.sync.server.parts import PartOfModel
from shoal.sync.state import ParameterRun, StateSource, TrainState

_STATE = "momentum"  # of the optimizer


class Anchor(PartOfModel):
    """Of weights that it takes for its own."""

    def __init__(self, named: Mapping[str, Tensor]):
        super().__init__({name: nn.Parameter(value) for name, value in named.items()})


def served_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those that servers have an anchor of."""
    return {name: p.detach() for name, p in averaged_parameters(model).items() if p.numel()}


class OuterSGD(torch.optim.Optimizer):
    """SGD with Nesterov momentum on sums over `total`. A rate of 1 without momentum averages."""

    element_wise = True

    def __init__(self, parameters: Iterable[Tensor], rule: OuterConfig, total: int = 1):
        own = list(parameters) or [torch.empty(0)]  # a stage may train nothing; torch asks for one
        super().__init__(own, {"lr": rule.rate, "momentum": rule.momentum})
        self.total = float(total)  # no setting: it is of the replicas that there are now

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group["lr"], group["momentum"])

    def _move(self, p: Tensor, rate: float, momentum: float) -> None:
        wide = torch.promote_types(p.dtype, torch.float32)
        assert p.grad is not None
        if momentum and not self.state[p]:
            self.state[p][_STATE] = torch.zeros_like(p, dtype=wide)
        velocity = self.state[p][_STATE] if momentum else None
        p.copy_(outer_step(p, p.grad.to(wide) / self.total, velocity, rate, momentum))


def make_outer(model: nn.Module, plan: Plan) -> tuple[Anchor, OuterSGD]:
    """What a server of local steps trains, and by what; `model` may be a part of it."""
    anchor = Anchor(served_weights(model))
    total = plan.num_apart if plan.staleness_bound == 0 else 1  # terms of a sum
    return anchor, OuterSGD(anchor.parameters(), OuterConfig(*plan.outer_rates), total)


def outer_name(name: str) -> str:
    """The name in a checkpoint of what servers call so; the same over all-reduce."""
    parameter = name.removeprefix("optimizer.").removesuffix(f".{_STATE}")
    return MOMENTUM + parameter if name.startswith("optimizer.") else name


class OuterSource:
    """A checkpoint as servers of an anchor take it. A momentum that is missing is none."""

    def __init__(self, source: StateSource, anchor: Anchor, rule: OuterConfig):
        self._source = source
        alike: dict[Tensor, ParameterRun] = {
            nn.Parameter(torch.empty_like(p, device="meta")): ParameterRun(name, p.shape)
            for name, p in anchor.named_parameters()
        }
        optimizer = OuterSGD(alike, rule)
        for p, run in alike.items():
            if rule.momentum and MOMENTUM + run.name in source:
                optimizer.state[p] = {_STATE: torch.empty_like(p)}
        self.plain: Mapping[str, Any] = TrainState({}, optimizer, alike).state_dict().plain

    def __contains__(self, name: str) -> bool:
        return self._found(name) in self._source

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._found(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._found(name))

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        self._source.fill(self._found(name), places)

    def _found(self, name: str) -> str:
        anchor = ANCHOR + name.removeprefix("model.")
        if name.startswith("model.") and anchor in self._source:
            return anchor
        return outer_name(name)
