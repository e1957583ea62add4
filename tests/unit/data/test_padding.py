"""Padding: lengths, fills, masks, and that a masked loss does not see how a batch was cut."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.data.batches import Batches, LoadOptions
from shoal.errors import RecipeError, UsageError

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(lengths, st.integers(1, 4))
def test_values_stay_and_the_rest_is_filled(sizes: list[int], multiple: int) -> None:
    samples = [(torch.arange(size) + 1, torch.arange(size) + 5) for size in sizes]
    (inputs, mask), target = shoal.data.pad(mask=True, multiple=multiple)(samples)
    longest = -(-max(sizes) // multiple) * multiple
    assert inputs.shape == mask.shape == target.shape == (len(sizes), longest)
    for row, size in enumerate(sizes):
        assert inputs[row, :size].tolist() == list(range(1, size + 1))
        assert not inputs[row, size:].any()
        assert mask[row].tolist() == [True] * size + [False] * (longest - size)
        assert (target[row, size:] == -100).all() and (target[row, :size] >= 0).all()


def test_dicts_tuples_lists_arrays_and_numbers() -> None:
    samples = [
        ({"input_ids": [3, 4], "pixels": np.ones((1, 2), np.float32)}, 1),
        ({"input_ids": [5], "pixels": np.ones((2, 1), np.float32)}, 0),
    ]
    inputs, target = shoal.data.pad(value=9, mask="attention_mask")(samples)
    assert inputs["input_ids"].tolist() == [[3, 4], [5, 9]]
    assert inputs["attention_mask"].tolist() == [[True, True], [True, False]]
    assert inputs["pixels"].shape == (2, 2, 2)
    assert target.tolist() == [1, 0]
    pairs = [((torch.ones(2), torch.ones(1)), 1.0), ((torch.ones(1), torch.ones(1)), 2.0)]
    (first, second, mask), _ = shoal.data.pad(mask=True)(pairs)
    assert first.shape == (2, 2) and second.shape == (2, 1) and mask.sum() == 3


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([torch.ones(2)], "takes pairs"),
        ([(torch.ones(1), 0), (torch.ones(1, 1), 0)], "number of dimensions"),
        ([(torch.ones(1), 0), (torch.ones(1).long(), 0)], "float32 .1. and int64 .1."),
        ([({"x": [1]}, 0)], "Give the name"),
        ([(1.0, 0)], "length of the inputs"),
    ],
)
def test_what_does_not_fit_is_refused(samples: list[Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        shoal.data.pad(mask=True)(samples)


def test_a_multiple_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple=0"):
        shoal.data.pad(multiple=0)


@given(st.integers(0, 99), st.sampled_from([1, 2, 3, 6]))
def test_sum_and_weight_do_not_depend_on_the_pieces(seed: int, num_pieces: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 8, (6,), generator=draws).tolist()
    data = [
        (torch.randn(n, 3, generator=draws), torch.randint(3, (n,), generator=draws)) for n in sizes
    ]
    loading = LoadOptions(shoal.data.pad())
    batch = Batches(data, batch_size=6, num_pieces=num_pieces, loading=loading).at(0)
    found = [shoal.losses.labels(p.inputs, p.target) for p in map(batch.piece, range(num_pieces))]
    whole = Batches(data, batch_size=6, loading=loading).at(0).piece(0)
    total, weight = shoal.losses.labels(whole.inputs, whole.target)
    assert sum(int(w) for _, w in found) == int(weight) == sum(sizes)
    assert torch.allclose(sum(t for t, _ in found), total, rtol=1e-5)
