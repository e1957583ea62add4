"""Tokens: masking by BERT's shares, dropout, spans; special tokens are left alone."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.transforms import tokens
from shoal.data.transforms.randomness import sample_generator
from shoal.errors import RecipeError, UsageError

IDS = np.random.default_rng(0).integers(5, 1000, 20_000)
IDS[::10] = 1  # special


def test_masking_has_the_shares_of_bert() -> None:
    before = IDS.copy()
    inputs, labels = tokens.mask(
        IDS, sample_generator(0, 0, 0), mask=4, vocabulary=1000, special=(0, 1), ignore=-100
    )
    assert np.array_equal(IDS, before)
    chosen = labels != -100
    assert not chosen[::10].any() and abs(chosen.mean() / 0.9 - 0.15) < 0.01
    assert np.array_equal(labels[chosen], IDS[chosen])
    assert np.array_equal(inputs[~chosen], IDS[~chosen])
    masked, same = inputs[chosen] == 4, inputs[chosen] == IDS[chosen]
    assert abs(masked.mean() - 0.8) < 0.03 and abs(same.mean() - 0.1) < 0.02
    others = inputs[chosen][~masked & ~same]
    assert others.min() >= 0 and others.max() < 1000


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_tensors_stay_tensors(dtype: torch.dtype) -> None:
    given = torch.arange(50, dtype=dtype)
    inputs, labels = tokens.mask(given, sample_generator(0, 0, 0), mask=4, vocabulary=100)
    assert inputs.dtype == dtype and labels.dtype == torch.int64
    assert tokens.drop(given, sample_generator(0, 0, 0), replacement=3).dtype == dtype
    assert tokens.span(given, sample_generator(0, 0, 0), length=9).dtype == dtype
    array, _ = tokens.mask(given.numpy(), sample_generator(0, 0, 0), mask=4, vocabulary=100)
    assert np.array_equal(array, inputs.numpy())


def test_dropout() -> None:
    found = tokens.drop(IDS, sample_generator(0, 0, 0), replacement=3, chance=0.2, special=(1,))
    changed = found != IDS
    assert (found[changed] == 3).all() and not changed[::10].any()
    assert abs(changed.mean() / 0.9 - 0.2) < 0.01
    assert np.array_equal(tokens.drop(IDS, sample_generator(0, 0, 0), replacement=3, chance=0), IDS)


def test_spans() -> None:
    given = np.arange(10)
    starts = set()
    for index in range(100):
        found = tokens.span(given, sample_generator(0, 0, index), length=4)
        assert np.array_equal(found, np.arange(found[0], found[0] + 4))
        starts.add(int(found[0]))
    assert starts == set(range(7))
    filled = tokens.span(given, sample_generator(0, 0, 0), length=12, fill=-1)
    assert filled.tolist() == [*range(10), -1, -1]
    with pytest.raises(RecipeError, match="10 tokens has no span of 12"):
        tokens.span(given, sample_generator(0, 0, 0), length=12)


@pytest.mark.parametrize("given", [np.zeros(3), np.zeros((2, 2), int), [1, 2], torch.zeros(3)])
def test_what_are_no_tokens_is_refused(given: Any) -> None:
    with pytest.raises(RecipeError, match="are no tokens"):
        tokens.span(given, sample_generator(0, 0, 0), length=1)
    with pytest.raises(UsageError, match="from 0 to 1"):
        tokens.drop(given, sample_generator(0, 0, 0), replacement=1, chance=2)
    with pytest.raises(UsageError, match="at least 1 token"):
        tokens.span(given, sample_generator(0, 0, 0), length=0)
