"""A peer that crashes costs a row at the most, never the bench."""

import pytest

from bench import harness
from bench.harness import ArmFailed, Row, interleave


def test_an_arm_that_fails_once_is_measured_again() -> None:
    answers = iter([ArmFailed("aborted"), 1.0, 2.0])

    def arm() -> float:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert interleave({"peer": arm}, num_rounds=2, num_warm_up=0) == {"peer": [1.0, 2.0]}


def test_an_arm_that_fails_twice_is_a_row_that_was_not_measured() -> None:
    def measure():
        yield Row(name="first", floor=1.0, value=2.0, low=2.0, high=2.0)
        interleave({"peer": failing}, num_rounds=1)
        yield Row(name="second", floor=1.0)

    def failing() -> float:
        raise ArmFailed("terminate called\nwithout an active exception")

    first, rest = harness._until_it_fails(measure(), "dp")
    assert (first.name, harness.verdict(first)) == ("first", "reached")
    assert (rest.name, harness.verdict(rest)) == ("dp, the rest", "not measured")
    assert rest.note == "terminate called"


def test_an_error_of_the_bench_itself_is_not_swallowed() -> None:
    def wrong() -> float:
        raise RuntimeError("the losses differ")

    with pytest.raises(RuntimeError, match="losses differ"):
        interleave({"arm": wrong}, num_rounds=1)
