"""Draws depend on seed, epoch, index and layer alone; functions are asked once what they take."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.transforms.randomness import Random, chain, is_random, on, sample_generator
from shoal.errors import RecipeError, UsageError

KEYS = st.tuples(
    st.integers(-(2**63), 2**64),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 9),
)


@given(KEYS, KEYS)
def test_a_key_gives_its_own_draws(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    first = sample_generator(*one).bytes(16)
    assert sample_generator(*one).bytes(16) == first
    if tuple(part % 2**64 for part in one) != tuple(part % 2**64 for part in other):
        assert sample_generator(*other).bytes(16) != first


def test_neighbouring_samples_are_unlike() -> None:
    values = np.array([sample_generator(0, 0, index).random() for index in range(4000)])
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


def test_the_draws_of_numpy_are_those_that_were_recorded() -> None:
    random = sample_generator(1, 2, 3)
    assert random.bytes(8).hex() == "a5a1bba01c653dbf"
    assert random.random() == 0.12970415616974829
    assert random.integers(1000, size=4).tolist() == [661, 36, 709, 430]
    assert random.standard_normal() == 1.4327542543028946
    assert random.uniform(-1, 1) == 0.23954560580273987


def one(value: Any) -> Any:
    return value


def two(value: Any, random: Random) -> Any:
    return value, random


def with_option(value: Any, factor: float = 2.0) -> Any:
    return value * factor


def optional(value: Any, random: Random | None = None) -> Any:
    return value, random


def three(value: Any, random: Random, *, scale: float) -> Any:
    return value, random, scale


class Changes:
    def __call__(self, value: Any, random: Random) -> Any:
        return value


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (one, False),
        (two, True),
        (with_option, False),
        (optional, True),
        (partial(three, scale=1.0), True),
        (Changes(), True),
        (lambda *parts: parts, False),
        (len, False),
        (str.strip, False),
        (int, False),
    ],
)
def test_who_draws_is_told_by_the_signature(function: Any, expected: bool) -> None:
    assert is_random(function) is expected


def many(a: Any, b: Any, c: Any) -> Any: ...


@pytest.mark.parametrize("function", [three, many, lambda: 1])
def test_functions_that_need_more_are_refused(function: Any) -> None:
    with pytest.raises(UsageError, match=r"functools\.partial"):
        is_random(function)


def test_a_chain_goes_in_turn_and_draws_from_one_generator() -> None:
    def add(value: float, random: Random) -> float:
        return value + random.random()

    both = chain(add, lambda value: value * 2, add)
    random = sample_generator(0, 0, 0)
    first, second = random.random(), random.random()
    assert is_random(both) and both(1.0, sample_generator(0, 0, 0)) == (1.0 + first) * 2 + second
    plain = chain(lambda value: value + 1, lambda value: value * 10)
    assert not is_random(plain) and plain(1) == 20
    with pytest.raises(UsageError, match="no function"):
        chain()


def test_one_field_is_changed() -> None:
    sample = ({"pixels": 3, "name": "x"}, 7)
    double = on("inputs.pixels", lambda value: 2 * value)
    assert double(sample) == ({"pixels": 6, "name": "x"}, 7)
    assert sample == ({"pixels": 3, "name": "x"}, 7)
    drawn = on("target", lambda value, random: random.random())
    assert (
        is_random(drawn)
        and drawn(sample, sample_generator(0, 0, 1))[1] == sample_generator(0, 0, 1).random()
    )
    with pytest.raises(RecipeError, match=r"no field 'inputs.pixel'.*'pixels'"):
        on("inputs.pixel", abs)(sample)
