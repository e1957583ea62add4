"""Runs for tests of the queue: one that takes its time until there is a file, one that hangs."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


def _run(wait: Callable[[], object], steps: int) -> shoal.Run:
    inputs = torch.linspace(-1, 1, 120)[:, None]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        wait()
        return F.mse_loss(output, target)

    return shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1)),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(inputs, 2 * inputs),
        batch_size=12,
        steps=steps,
    )


def patient(file: str = "hurry", pause: float = 0.1) -> shoal.Run:
    """Each step is slow until the file is there."""
    return _run(lambda: Path(file).exists() or time.sleep(pause), 1200)


def stuck() -> shoal.Run:
    """A step that never ends."""
    return _run(lambda: time.sleep(600), 5)


def fails() -> shoal.Run:
    raise KeyError("a key of the recipe's own")
