"""A small convolutional network that reads handwritten digits.

    shoal train recipes/digits.py:small
    shoal verify recipes/digits.py:small --plan "data=2"
    shoal tune recipes/digits.py:small --space "lr=log:1e-3..0.3 channels=4|8|16" --trials 8

BatchNorm, whose buffers are state beside the parameters, and a residual connection. Of the 5,000
digits every tenth is held out; about 96 % of those are read correctly after 3 passes.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


class Residual(nn.Module):
    """Two convolutions whose result is added to what came in."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_first = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_second = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm_first(self.first(x)))
        return F.relu(x + self.norm_second(self.second(hidden)))


class Network(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 5, stride=2, padding=2, bias=False)  # 28 -> 14
        self.norm = nn.BatchNorm2d(channels)
        self.residual = Residual(channels)
        self.head = nn.Linear(channels * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.residual(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(F.max_pool2d(x, 2).flatten(1))
        return logits


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == target).float().mean()


@cache
def split() -> tuple[Tensor, ...]:
    """Images and labels to train on, and those held out. Trials of `shoal tune` read them once."""
    images, labels = shoal.data.catalog.digits()
    chosen = torch.arange(len(labels)) % 10 == 0  # the digits come sorted: 50 of each kind
    return images[~chosen], labels[~chosen], images[chosen], labels[chosen]


def small(channels: int = 16, lr: float = 0.02, decay: float = 1e-4) -> shoal.Run:
    images, labels, unseen_images, unseen_labels = split()
    return shoal.Run(
        model=lambda: Network(channels),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=lr, momentum=0.9, weight_decay=decay),
        schedule=shoal.schedules.cosine(warmup=10),
        data=shoal.data.tensors(images, labels),
        evaluate=shoal.data.tensors(unseen_images, unseen_labels),
        metrics={"accuracy": accuracy},
        batch_size=64,
        steps=210,
    )
