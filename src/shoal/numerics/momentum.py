"""Momentum where gradients are sent late: deep gradient compression.

An optimizer's momentum on gradients of which each element arrives only now and then would forget
most of the time that passes in between. So each replica keeps a velocity of its own before it
packs, and the optimizer adds what arrives without a momentum of its own; what was sent starts
again from zero, so that no old direction is sent twice. Lin et al. 2018, arXiv 1712.01887.

It is for SGD with momentum. Adam's moments are taken of what arrives, as they are elsewhere. Cost:
four bytes for each element that is packed.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class Momentum(NamedTuple):
    factor: float
    nesterov: bool

    def advance(self, velocity: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity after a gradient, and what is to be sent of it, as SGD would step on."""
        velocity = velocity * self.factor + gradient
        return velocity, gradient + velocity * self.factor if self.nesterov else velocity


def corrected_momenta(codec: str, optimizer: Optimizer) -> dict[Tensor, Momentum]:
    """The momentum of each parameter that a codec takes over from its optimizer, if it packs it."""
    if not codec.startswith("topk:"):
        return {}
    return {
        p: Momentum(float(group["momentum"]), bool(group["nesterov"]))
        for group in optimizer.param_groups
        if _is_corrected(optimizer, group)
        for p in group["params"]
    }


@contextmanager
def without_momentum(optimizer: Optimizer, packed: Collection[Tensor]) -> Iterator[None]:
    """Step on gradients in which it is already, those of what is packed. Their weight decay, which
    is not in them, counts for as much as momentum would have made of it."""
    before, groups = optimizer.param_groups, list[dict[str, Any]]()
    for group in before:
        if not _is_corrected(optimizer, group):
            groups.append(group)
            continue
        decay = group["weight_decay"] / (1 - group["momentum"])
        own = [p for p in group["params"] if p in packed]
        others = [p for p in group["params"] if p not in packed]
        changed = {"momentum": 0.0, "nesterov": False, "weight_decay": decay}
        groups += [group | changed | {"params": own}] if own else []
        groups += [group | {"params": others}] if others else []
    optimizer.param_groups = groups
    try:
        yield
    finally:
        optimizer.param_groups = before


def _is_corrected(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return is_sgd and 0 < group["momentum"] < 1 and not group["dampening"]
