"""A tiny run for tests of commands: a loss that may be slow, and says what it was started with."""

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


def line(pause: float = 0.0) -> shoal.Run:
    inputs = torch.linspace(-1, 1, 64)[:, None]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(pause)
        return F.mse_loss(output, target)

    print(f"greeting {os.environ.get('GREETING', 'none')} in {os.getcwd()}")
    return shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1)),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        data=shoal.data.tensors(inputs, 2 * inputs),
        batch_size=8,
        steps=8,
    )


def fails() -> shoal.Run:
    raise KeyError("a key of the recipe's own")


def large() -> shoal.Run:
    """Whose weights, and what is done to them, are more than one thread's work."""
    inputs = torch.ones(1 << 12, 1 << 8).add_(1.0)
    return shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1 << 8, 1 << 10), nn.ReLU(), nn.Linear(1 << 10, 1)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
        data=shoal.data.tensors(inputs, inputs[:, :1]),
        batch_size=1 << 11,
        steps=2,
    )
