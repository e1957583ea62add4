"""The digits recipe as one would write it without Shoal: what the peers of `bench/tune.py` train.

Imported by processes that peers start; a process reads the digits once.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any


@cache
def _data() -> tuple[Any, ...]:
    import torch

    from shoal.data import catalog

    torch.set_num_threads(1)
    images, labels = catalog.digits()
    held_out = torch.arange(len(labels)) % 10 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def train_by_hand(settings: Mapping[str, Any], num_steps: int) -> float:
    """The recipe as one would write it without Shoal: the loss of the held-out digits."""
    import torch
    from torch.nn import functional as F

    from recipes.digits import Network
    from shoal.numerics.schedules import cosine

    images, labels, held_out, held_out_labels = _data()
    torch.manual_seed(0)
    model, rate_of = Network(settings["channels"]), cosine(warmup=10)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings["lr"], momentum=0.9, weight_decay=1e-4, fused=True
    )
    batches: list[Any] = []
    for step in range(num_steps):
        if not batches:
            batches = list(torch.randperm(len(labels)).split(64))[: len(labels) // 64]
        chosen = batches.pop()
        for group in optimizer.param_groups:
            group["lr"] = settings["lr"] * rate_of(step, num_steps)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        sums = [
            F.cross_entropy(model(part), target, reduction="sum").item()
            for part, target in zip(held_out.split(64), held_out_labels.split(64))
        ]
    return sum(sums) / len(held_out_labels)


def told(number: int, settings: Mapping[str, Any], num_steps: int) -> tuple[int, float]:
    return number, train_by_hand(settings, num_steps)
