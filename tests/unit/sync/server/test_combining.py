"""Rules that make one gradient of several: against sorted numpy, and with a hostile replica."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.sync.server.combining import combine, combine_losses

# None so small that a quarter of it is no number of single precision.
VALUES = st.floats(-1e6, 1e6, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0)
SHARES = st.sampled_from([0.05, 0.1, 0.2, 0.25, 0.3, 0.45])
EVIL = st.sampled_from([1e30, -1e30, math.nan, math.inf, -math.inf])


@st.composite
def replicas(draw: st.DrawFn) -> tuple[list[Tensor], list[float]]:
    """Rows, and powers of two as weights, by which division is exact."""
    num_rows, length = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    rows = [
        torch.tensor(draw(st.lists(VALUES, min_size=length, max_size=length)))
        for _ in range(num_rows)
    ]
    weights = draw(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=num_rows, max_size=num_rows))
    return rows, weights


def means_of(rows: list[Tensor], weights: list[float]) -> np.ndarray:
    return np.stack([row.double().numpy() / w for row, w in zip(rows, weights, strict=True)])


@given(replicas())
def test_the_median_is_numpys(given_rows) -> None:
    found = combine("median", *given_rows).numpy()
    np.testing.assert_array_equal(found, np.median(means_of(*given_rows), axis=0).astype("f4"))


@given(replicas(), SHARES)
def test_the_trimmed_mean_leaves_out_a_share_of_either_end(given_rows, share: float) -> None:
    means = np.sort(means_of(*given_rows), axis=0)
    num_dropped = min(math.ceil(round(share * len(means), 9)), (len(means) - 1) // 2)
    expected = means[num_dropped : len(means) - num_dropped].mean(axis=0)
    found = combine(f"trimmed:{share}", *given_rows).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@given(replicas(), st.sampled_from(["median", "trimmed:0.2"]), st.randoms())
def test_the_order_of_replicas_does_not_matter(given_rows, rule: str, random) -> None:
    rows, weights = given_rows
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = combine(rule, [rows[i] for i in order], [weights[i] for i in order])
    assert torch.equal(shuffled, combine(rule, rows, weights))


@given(replicas(), st.data(), st.sampled_from(["median", "trimmed:0.1", "trimmed:0.4"]))
def test_a_hostile_replica_cannot_leave_the_range_of_the_others(given_rows, data, rule) -> None:
    rows, weights = given_rows
    while len(rows) < 2:
        rows, weights = rows + rows, weights + weights
    means = means_of(rows, weights).astype("f4")
    evil = torch.tensor([data.draw(EVIL) for _ in rows[0]])
    at = data.draw(st.integers(0, len(rows)))
    found = combine(rule, [*rows[:at], evil, *rows[at:]], [*weights[:at], 1.0, *weights[at:]])
    assert (found.numpy() >= means.min(axis=0)).all()
    assert (found.numpy() <= means.max(axis=0)).all()


def test_the_middle_of_large_numbers_is_finite() -> None:
    rows = [torch.tensor([3e38, -3e38]), torch.tensor([3e38, 3e38])]
    assert combine("median", rows, [1.0, 1.0]).tolist() == [rows[0][0].item(), 0.0]


@pytest.mark.parametrize("rule", ["median", "trimmed:0.2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_stays(rule: str, dtype: torch.dtype) -> None:
    rows = [torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)]
    assert combine(rule, rows, [1.0, 1.0]).dtype == dtype


@pytest.mark.parametrize(
    ("rule", "expected"), [("median", 2.5), ("trimmed:0.2", 2.5), ("trimmed:0.4", 2.5)]
)
def test_losses_are_combined_as_gradients_are(rule: str, expected: float) -> None:
    """Four replicas: the means of their pieces are 1, 2, 3, and nothing."""
    sums, weights = [2.0, 2.0, 12.0, math.nan, 4.0], [2.0, 2.0, 4.0, 4.0, 2.0]
    shares = [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert combine_losses(rule, sums, weights, shares) == expected
    gradients = [torch.tensor([sum(sums[i] for i in own)]) for own in shares]
    weight = [sum(weights[i] for i in own) for own in shares]
    assert combine(rule, gradients, weight).item() == expected
