"""Tiny runs whose samples lie on a server; STORE_URL says where."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


def pair(entry: Any) -> tuple[Tensor, Tensor]:
    number = float(entry["n"] if isinstance(entry, dict) else entry)
    return torch.tensor([number / 400]), torch.tensor([number / 200])


def run(data: Any, pause: float) -> shoal.Run:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(pause)
        return F.mse_loss(output, target)

    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.mapped(data, pair),
        batch_size=8,
        steps=20,
    )


def log(pause: float = 0.0) -> shoal.Run:
    return run(shoal.data.redis_log(os.environ["STORE_URL"], "log"), pause)


def entries(pause: float = 0.0) -> shoal.Run:
    return run(shoal.data.redis_list(os.environ["STORE_URL"], "list"), pause)


def documents(pause: float = 0.0) -> shoal.Run:
    return run(shoal.data.mongodb(os.environ["STORE_URL"], "samples", key="n"), pause)


def rows(pause: float = 0.0) -> shoal.Run:
    import psycopg

    url = os.environ["STORE_URL"]
    return run(shoal.data.sql(lambda: psycopg.connect(url), "samples", key="n"), pause)


def cached(pause: float = 0.0) -> shoal.Run:
    """Made here, and kept on a server."""
    source = [{"n": number} for number in range(400)]
    kept = shoal.data.cached(source, memory=None, redis=os.environ["STORE_URL"])
    return run(kept, pause)
