"""Sources in memory pass the suite that every source must pass."""

from typing import Any

import pytest
import torch

from shoal.data.sources import tensors, windows
from shoal.testing.sources import Case, SourceConformance, in_fork, in_threads, same


class TestTensors(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        inputs, target = torch.arange(12.0).view(6, 2), torch.arange(6)
        pairs = [(inputs[row].clone(), target[row].clone()) for row in range(6)]
        return Case(lambda: tensors(inputs, target), pairs)


class TestWindows(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        tokens = torch.arange(33, dtype=torch.uint8)
        row = tokens.long()
        pairs = [(row[at : at + 8], row[at + 1 : at + 9]) for at in range(0, 32, 8)]
        return Case(lambda: windows(tokens, 8), pairs)


class TestPlainList(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        pairs = [(torch.tensor([float(row)]), row) for row in range(4)]
        return Case(lambda: list(pairs), [(pair[0].clone(), pair[1]) for pair in pairs])


class Endless:
    """A source that goes on behind its end."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return index % 3


def test_the_suite_catches_what_it_is_for() -> None:
    suite = SourceConformance()
    case = Case(Endless, [0, 1, 2])
    with pytest.raises(pytest.fail.Exception):
        suite.test_nothing_lies_outside(case)
    with pytest.raises(AssertionError, match="sample 1"):
        suite.test_in_forks(Case(Endless, [0, 2, 1]))
    with pytest.raises(AssertionError, match="sample 1"):
        suite.test_length_and_indexes(Case(Endless, [0, 2, 1]))


def test_what_fails_in_a_fork_or_thread_is_shown() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("in here")

    with pytest.raises(AssertionError, match="in here"):
        in_fork(fail)
    with pytest.raises(ValueError, match="in here"):
        in_threads(fail)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (True, 1),
        ((1, 2), [1, 2]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2).numpy(), torch.zeros(3).numpy()),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (b"a", "a"),
    ],
)
def test_unlike_samples_are_not_the_same(left: Any, right: Any) -> None:
    assert same(left, left) and same(right, right)
    assert not same(left, right)
