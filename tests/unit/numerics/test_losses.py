"""Losses over logits: as torch computes them, as sums and weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.errors import RecipeError
from shoal.numerics import losses

LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([[1, 2, -100, 3, 6], [-100, -100, 0, 4, 5]])


@pytest.mark.parametrize(
    "output",
    [LOGITS, {"logits": LOGITS}, SimpleNamespace(logits=LOGITS), (LOGITS, "more")],
    ids=["tensor", "dict", "object", "tuple"],
)
def test_the_mean_is_torchs(output: Any) -> None:
    total, weight = losses.labels(output, TARGET)
    assert weight == 7
    assert torch.allclose(total / weight, F.cross_entropy(LOGITS.flatten(0, 1), TARGET.flatten()))


def test_the_next_token_is_that_of_the_place_before() -> None:
    total, weight = losses.next_token(LOGITS, TARGET)
    mean = F.cross_entropy(LOGITS[:, :-1].flatten(0, 1), TARGET[:, 1:].flatten())
    assert weight == 6 and torch.allclose(total / weight, mean)


def test_classes() -> None:
    total, weight = losses.labels(LOGITS[:, 0], torch.tensor([3, 1]))
    assert torch.allclose(total / 2, F.cross_entropy(LOGITS[:, 0], torch.tensor([3, 1])))
    assert weight == 2


def test_what_has_no_logits_or_other_ones_is_refused() -> None:
    with pytest.raises(RecipeError, match="a dict without them"):
        losses.labels({"hidden": LOGITS}, TARGET)
    with pytest.raises(RecipeError, match=r"logits \[2, 5, 7\] and labels \[2, 4\]"):
        losses.labels(LOGITS, TARGET[:, 1:])
