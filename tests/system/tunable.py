"""A tiny recipe to be tuned: a line through points, whose best rate is known to be in between."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

INPUTS = torch.linspace(-1, 1, 64)[:, None]


def line(lr: float = 0.1, width: int = 4, pause: float = 0.0, decay: float = 0.0) -> shoal.Run:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(pause)
        return F.mse_loss(output, target)

    return shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1)),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=lr, weight_decay=decay),
        data=shoal.data.tensors(INPUTS, 2 * INPUTS),
        evaluate=shoal.data.tensors(INPUTS, 2 * INPUTS),
        evaluate_every=4,
        metrics={"accuracy": lambda output, target: ((output - target).abs() < 0.1).float().mean()},
        batch_size=8,
        steps=12,
        save_every=4,
    )


def unmeasured(lr: float = 0.1) -> shoal.Run:
    """Judged by its loss."""
    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=lr),
        data=shoal.data.tensors(INPUTS, 2 * INPUTS),
        batch_size=8,
        steps=8,
    )


def moody(lr: float = 0.1, mood: str = "good") -> shoal.Run:
    """Fails in a bad mood."""
    if mood == "bad":
        raise ValueError("in a bad mood")
    return line(lr)


def space(trial: Any) -> Mapping[str, Any]:
    width = trial.suggest_int("width", 2, 4)
    return {"width": width, "lr": trial.suggest_float("lr", 0.01, 0.4 / width, log=True)}


def empty(trial: Any) -> Mapping[str, Any]:
    return {}
