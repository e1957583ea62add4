"""Structured pruning: fewer channels, where the model computes what it did without them."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.slim.structured import layers_of_one_width, remove_channels
from tests import zoo

pytest.importorskip("torch_pruning")


class Residual(nn.Module):
    """A convolutional network with a sum, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.outer = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).relu()
        x = x + self.outer(self.inner(x).relu())
        logits: Tensor = self.head(x.flatten(1))
        return logits


class Attention(nn.Module):
    """Heads, whose channels are not each for itself, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.narrow(self.wide(self.norm(x)).relu())
        return result


def run_of(model: Callable[[], nn.Module], inputs: Tensor) -> shoal.Run:
    data = shoal.data.tensors(inputs, torch.zeros(len(inputs)))
    return dataclasses.replace(zoo.mlp(), model=model, data=data, evaluate=None, metrics={})


def test_channels_go_and_shapes_stay_right() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 1, 4, 4)
    model = Residual().eval()
    before = copy.deepcopy(model)
    smaller = remove_channels(run_of(Residual, inputs), model, 0.5)
    assert isinstance(smaller, Residual)
    assert (smaller.stem.out_channels, smaller.inner.out_channels) == (4, 6)
    assert smaller.head.weight.shape == (3, 64) and smaller(inputs).shape == (16, 3)
    assert layers_of_one_width(model, smaller) == ["head"]
    for name, p in model.state_dict().items():
        assert p.equal(before.state_dict()[name]), "the model itself is not touched"


def test_heads_and_what_a_norm_sums_over_stay() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 5, 8)
    model = Attention().eval()
    smaller = remove_channels(run_of(Attention, inputs), model, 0.25)
    assert layers_of_one_width(model, smaller) == ["qkv", "out", "narrow"]
    assert smaller.get_parameter("wide.weight").shape == (12, 8)


def test_a_model_that_allows_none_is_refused() -> None:
    run = run_of(nn.Identity, torch.randn(16, 4))
    with pytest.raises(UsageError, match="No layer"):
        remove_channels(run, nn.Sequential(nn.Linear(4, 4)), 0.5)


def test_why_nothing_can_be_followed_is_said() -> None:
    class Caching(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), object()

    run = run_of(lambda: Caching(8, 8), torch.randn(16, 8))
    with pytest.raises(UsageError, match="torch-pruning cannot follow it: "):
        remove_channels(run, run.make_model(), 0.5)
