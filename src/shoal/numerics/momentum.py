"""Momentum where gradients are sent late: deep gradient compression.

An optimizer's momentum on gradients of which each element arrives only now and then would forget
most of the time that passes in between. So each replica keeps a velocity of its own before it
packs, and the optimizer adds what arrives without a momentum of its own; what was sent starts
again from zero, so that no old direction is sent twice. Lin et al. 2018, arXiv 1712.01887.

It is for SGD with momentum. Adam's moments are taken of what arrives, as they are elsewhere. Cost:
four bytes for each element that is packed.
"""

from collections.abc import Iterator
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
    """The momentum of each parameter that a codec takes over from its optimizer."""
    if not codec.startswith("topk:"):
        return {}
    return {
        p: Momentum(float(group["momentum"]), bool(group["nesterov"]))
        for group in _with_momentum(optimizer)
        for p in group["params"]
    }


@contextmanager
def without_momentum(optimizer: Optimizer) -> Iterator[None]:
    """Step on gradients in which it is already."""
    changed = [(group, group["momentum"]) for group in _with_momentum(optimizer)]
    for group, _ in changed:
        group["momentum"] = 0.0
    try:
        yield
    finally:
        for group, momentum in changed:
            group["momentum"] = momentum


def _with_momentum(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["momentum"] and not group["dampening"]:
            yield group
