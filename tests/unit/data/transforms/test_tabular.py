"""Rows of features: noise, dropout and swaps, of the size that was asked for."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.transforms import tabular
from shoal.data.transforms.randomness import sample_generator
from shoal.errors import RecipeError, UsageError

ROW = np.linspace(1, 2, 20_000).astype(np.float32)


def test_noise() -> None:
    before = ROW.copy()
    found = tabular.noise(ROW, sample_generator(0, 0, 0), scale=0.5)
    assert found.dtype == np.float32 and np.array_equal(ROW, before)
    assert abs((found - ROW).std() - 0.5) < 0.02 and abs((found - ROW).mean()) < 0.02
    each = tabular.noise(ROW[:2], sample_generator(0, 0, 0), scale=[0.0, 1.0])
    assert each[0] == ROW[0] and each[1] != ROW[1]


def test_drop() -> None:
    found = tabular.drop(ROW, sample_generator(0, 0, 0), chance=0.25, fill=-1)
    assert abs((found == -1).mean() - 0.25) < 0.02
    assert np.array_equal(found[found != -1], ROW[found != -1])
    each = tabular.drop(torch.ones(2), sample_generator(0, 0, 0), chance=1.0, fill=[3, 4])
    assert each.tolist() == [3, 4] and each.dtype == torch.float32


def test_swap_takes_the_same_feature_of_other_rows() -> None:
    table = np.arange(3)[:, None] * 1000.0 + np.arange(200)
    found = tabular.swap(np.full(200, -5.0), sample_generator(0, 0, 0), table=table, chance=0.5)
    swapped = found != -5
    assert 60 < swapped.sum() < 140
    assert (found[swapped] % 1000 == np.flatnonzero(swapped)).all()
    assert set((found[swapped] // 1000).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("given", [np.zeros(3, int), np.zeros((2, 2)), [1.0], torch.zeros(2, 2)])
def test_what_is_no_row_is_refused(given: Any) -> None:
    with pytest.raises(RecipeError, match="is no row of features"):
        tabular.noise(given, sample_generator(0, 0, 0))


def test_what_was_asked_wrongly_is_said() -> None:
    random = sample_generator(0, 0, 0)
    with pytest.raises(UsageError, match="scale=-1"):
        tabular.noise(ROW, random, scale=-1)
    with pytest.raises(UsageError, match="chance=2"):
        tabular.drop(ROW, random, chance=2)
    with pytest.raises(UsageError, match=r"\[rows, features\]"):
        tabular.swap(ROW, random, table=ROW)
    with pytest.raises(RecipeError, match="2 columns for 20000 features"):
        tabular.swap(ROW, random, table=np.zeros((3, 2)))
    with pytest.raises(RecipeError, match="3 scales for 20000 features"):
        tabular.noise(ROW, random, scale=[1, 2, 3])
