"""Merging: averages, task vectors and arcs, as arithmetic."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.slim import merging

vectors = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3).map(torch.tensor)


@given(st.lists(vectors, min_size=1, max_size=5))
def test_an_average_of_equal_weights_is_the_mean(values: list[torch.Tensor]) -> None:
    found = merging.average(values, [1.0] * len(values))
    torch.testing.assert_close(found, torch.stack(values).double().mean(0).float())


@given(vectors, vectors, st.floats(0.01, 10), st.floats(0.01, 10))
def test_weights_need_not_add_up_to_one(
    one: torch.Tensor, other: torch.Tensor, a: float, b: float
) -> None:
    found = merging.average([one, other], [a, b])
    torch.testing.assert_close(found, merging.average([one, other], [a / (a + b), b / (a + b)]))


def test_a_counter_is_the_first_models() -> None:
    counters = [torch.tensor(3), torch.tensor(9)]
    assert merging.average(counters, [0.5, 0.5]) == 3
    assert merging.interpolate_on_sphere(*counters, 0.5) == 3


@given(vectors, vectors)
def test_one_task_vector_of_weight_one_is_the_model_itself(
    base: torch.Tensor, value: torch.Tensor
) -> None:
    torch.testing.assert_close(merging.add_task_vectors(base, [value], [1.0]), value)
    torch.testing.assert_close(merging.merge_ties(base, [value], [1.0], density=1.0), value)


def test_ties_keeps_the_largest_and_the_sign_of_the_sum() -> None:
    base = torch.zeros(4)
    one, other = torch.tensor([4.0, 1.0, 0.1, -3.0]), torch.tensor([2.0, -5.0, 0.1, -1.0])
    found = merging.merge_ties(base, [one, other], [1.0, 1.0], density=0.5)
    # Of each the two largest stay: (4, -, -, -3) and (2, -5, -, -).
    torch.testing.assert_close(found, torch.tensor([3.0, -5.0, 0.0, -3.0]))


@given(vectors, vectors)
def test_an_arc_ends_at_both_models(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(merging.interpolate_on_sphere(one, other, 0.0), one)
    torch.testing.assert_close(merging.interpolate_on_sphere(one, other, 1.0), other)


def test_an_arc_keeps_the_length() -> None:
    middle = merging.interpolate_on_sphere(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5)
    assert float(middle.norm()) == pytest.approx(1.0)
    assert float(middle[0]) == pytest.approx(math.sqrt(0.5))


@given(st.integers(1, 30), st.floats(0.01, 0.99))
def test_weights_of_an_exponential_average(count: int, decay: float) -> None:
    weights = merging.decayed_weights(count, decay)
    assert sum(weights) == pytest.approx(1.0)
    mean = 0.0
    for index, value in enumerate(range(count)):
        mean = float(value) if not index else decay * mean + (1 - decay) * value
    assert sum(w * value for w, value in enumerate_pairs(weights)) == pytest.approx(mean)


def enumerate_pairs(weights: list[float]) -> list[tuple[float, int]]:
    return [(weight, value) for value, weight in enumerate(weights)]
