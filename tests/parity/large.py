"""A run with a large table, whose workers write down how much memory they took.

The figure is of what the system cannot take back: anonymous memory, at its most, above what there
was when the optimizer was made, which is before a checkpoint is loaded.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.storage.files import atomic_replace

WIDTH = 128


def held_bytes() -> int:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) * 1024


def watch(directory: Path) -> None:
    """Write down the most that this process holds more than now, until it ends."""

    def look() -> None:
        first = most = held_bytes()
        while True:
            if (now := held_bytes()) >= most:
                most = now
                with atomic_replace(directory / str(os.getpid())) as unfinished:
                    unfinished.write_text(str(most - first))
            time.sleep(0.002)

    threading.Thread(target=look, daemon=True).start()


def table(rows: int = 600_000, steps: int = 3, watched: str = "") -> shoal.Run:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        if watched and any(not p.numel() for _, p in named):  # a worker, which holds no rows
            watch(Path(watched))
        return torch.optim.SGD(named, lr=0.1)

    ids = torch.arange(64) * (rows // 64)
    return shoal.Run(
        model=lambda: nn.Sequential(
            nn.Embedding(rows, WIDTH, sparse=True), nn.Flatten(), nn.Linear(WIDTH, 1)
        ),
        loss=F.mse_loss,
        optimizer=optimizer,
        data=shoal.data.tensors(ids[:, None], ids[:, None] / rows),
        batch_size=16,
        steps=steps,
    )


class Lazily(nn.Module):
    """A table of 2^33 bytes, and as many of what an optimizer may keep."""

    def __init__(self, rows: int):
        super().__init__()
        self.table, self.head = shoal.Table(rows, 64), nn.Linear(64, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.table(ids).mean(1))
        return answer


def lazy(rows: int = 2**25, steps: int = 4, watched: str = "") -> shoal.Run:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        if watched:
            watch(Path(watched))
        return torch.optim.Adagrad(named, lr=0.1)

    draws = torch.Generator().manual_seed(3)
    ids = torch.randint(rows, (256, 8), generator=draws)
    return shoal.Run(
        model=lambda: Lazily(rows),
        loss=F.mse_loss,
        optimizer=optimizer,
        data=shoal.data.tensors(ids, (ids % 2).float().mean(1, keepdim=True)),
        batch_size=64,
        steps=steps,
    )
