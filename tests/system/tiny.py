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
