"""Sums are exact: any order and any division give the same integers, and the true sum."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.transforms.exact_sum import ExactSum, squares
from shoal.errors import RecipeError

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
MODEST = st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=40)


def sum_of(numbers: list[float]) -> ExactSum:
    made = ExactSum(1)
    made.add(np.array(numbers, np.float64).reshape(-1, 1))
    return made


@given(NUMBERS)
def test_a_sum_is_exact(numbers: list[float]) -> None:
    (total,) = sum_of(numbers).totals()
    assert total == sum(map(Fraction, numbers))


@given(MODEST)
def test_it_is_rounded_as_the_best_there_is(numbers: list[float]) -> None:
    assert float(sum_of(numbers).totals()[0]) == math.fsum(numbers)


@given(NUMBERS, st.randoms(), st.integers(0, 40))
def test_order_and_division_do_not_show(
    numbers: list[float], random: "np.random.Generator", cut: int
) -> None:
    whole = sum_of(numbers)
    shuffled = list(numbers)
    random.shuffle(shuffled)
    parts = ExactSum(1)
    for part in (shuffled[:cut], shuffled[cut:]):
        parts.merge(ExactSum.of(sum_of(part).packed()))
    assert parts.totals() == whole.totals()


@given(st.lists(st.floats(-1e140, 1e140), min_size=1, max_size=40))
def test_squares_are_exact_in_two_parts(numbers: list[float]) -> None:
    # Below this the second part of a square has no place; it is then smaller than 2**-1000.
    numbers = [0.0 if abs(number) < 1e-140 else number for number in numbers]
    product, lost = squares(np.array(numbers))
    for number, *parts in zip(numbers, product, lost):
        assert Fraction(number) ** 2 == sum(map(Fraction, parts))


def test_columns_are_summed_apart() -> None:
    made = ExactSum(3)
    made.add(np.array([[1.0, 1e300, 0.1], [2.0, -1e300, 0.2], [3.0, 5e-324, 0.3]]))
    first, second, third = made.totals()
    assert first == 6 and second == Fraction(5e-324)
    assert third == Fraction(0.1) + Fraction(0.2) + Fraction(0.3)


def test_a_square_without_a_place_is_refused() -> None:
    with pytest.raises(RecipeError, match="larger than"):
        squares(np.array([1e200]))
    assert ExactSum(2).totals() == [0, 0]
