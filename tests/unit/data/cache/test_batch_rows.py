"""A batch that is filled row by row equals the samples collated at once."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.cache.batch_rows import BatchBuffer, RowMismatch
from shoal.data.collating import collate_samples
from shoal.data.packing import pack, pack_parts

SHAPES = st.lists(st.integers(0, 3), max_size=3)
TYPES = st.sampled_from([torch.uint8, torch.float32, torch.int64, torch.bfloat16, torch.bool])


def tensor(shape: list[int], kind: torch.dtype) -> Any:
    return lambda number: torch.full(shape, number % 2, dtype=kind)


def array(shape: list[int]) -> Any:
    return lambda number: np.full(shape, number, dtype=np.float32)


LEAVES = st.one_of(
    st.builds(tensor, SHAPES, TYPES),
    st.builds(array, SHAPES),
    st.just(lambda number: number),
    st.just(lambda number: number / 7),
)
PARTS = st.one_of(
    LEAVES,
    st.lists(LEAVES, min_size=1, max_size=3).map(
        lambda made: lambda number: tuple(each(number) for each in made)
    ),
    st.dictionaries(st.sampled_from("abc"), LEAVES, min_size=1).map(
        lambda made: lambda number: {name: each(number) for name, each in made.items()}
    ),
)


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(theirs, dict):
        return list(mine) == list(theirs) and all(same(mine[k], theirs[k]) for k in theirs)
    return type(mine) is type(theirs) and all(map(same, mine, theirs))


@settings(max_examples=50)
@given(PARTS, PARTS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_rows_equal_collating(
    inputs: Any, target: Any, num_rows: int, chosen: random.Random
) -> None:
    samples = [(inputs(number), target(number)) for number in range(num_rows)]
    rows = BatchBuffer(num_rows)
    for row in chosen.sample(range(num_rows), num_rows):
        rows.place(row, samples[row])
    assert same(rows.pair(), collate_samples(samples))


@pytest.mark.parametrize(
    "second",
    [
        (torch.zeros(2), 1),
        (torch.zeros(3, dtype=torch.float64), 1),
        (torch.zeros(3), 1.0),
        (torch.zeros(3), torch.tensor(1)),
        ((torch.zeros(3),), 1),
        ({"a": torch.zeros(3)}, 1),
        (torch.zeros(3), 1, 2),
    ],
)
def test_a_sample_of_another_form_is_not_taken(second: Any) -> None:
    rows = BatchBuffer(2)
    rows.place(0, (torch.zeros(3), 1))
    with pytest.raises(RowMismatch):
        rows.place(1, second)


def test_what_rows_do_not_know_is_not_taken() -> None:
    samples: list[Any] = [("text", 1), (None, 1), (True, 1), (np.array(["a"]), 1), ([[1]], 1)]
    for sample in (*samples, 5, {"a": 1}, (torch.zeros(1),)):
        with pytest.raises(RowMismatch):
            BatchBuffer(1).place(0, sample)


@settings(max_examples=50)
@given(PARTS, PARTS, st.integers(2, 5), st.booleans())
def test_packed_samples_fill_rows_as_others_do(
    inputs: Any, target: Any, num_rows: int, in_one_piece: bool
) -> None:
    samples = [(inputs(number), target(number)) for number in range(num_rows)]
    rows = BatchBuffer(num_rows)
    assert rows.copy(0, memoryview(pack(samples[0]))) is None, "nothing is known yet"
    rows.place(0, samples[0])
    for row, sample in enumerate(samples[1:], 1):
        packed = pack(sample)
        copied = (
            rows.copy(row, memoryview(packed))
            if in_one_piece
            else rows.fill(row, pack_parts(sample))
        )
        assert copied is not None and b"".join(copied) == packed
    assert same(rows.pair(), collate_samples(samples))


def test_what_is_told_is_what_was_copied() -> None:
    """Not the original, which another process may write to meanwhile."""
    rows, packed = BatchBuffer(2), pack((torch.ones(4), 1))
    rows.place(0, (torch.zeros(4), 0))
    copied = rows.copy(1, memoryview(packed))
    assert copied is not None
    before = bytes(packed)
    packed[:] = bytes(len(packed))
    assert b"".join(copied) == before


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2), 1),
        (torch.zeros(3, dtype=torch.int32), 1),
        (torch.zeros(3), 1.0),
        (torch.zeros(3), True),
        (torch.zeros(3), None),
        (torch.zeros(3), torch.tensor(1)),
        (np.zeros(3, dtype=np.float32), 1),
        [torch.zeros(3), 1],
        (torch.zeros(3), 1, 2),
        5,
    ],
)
def test_a_packed_sample_of_another_form_is_left_to_place(other: Any) -> None:
    rows = BatchBuffer(2)
    rows.place(0, (torch.zeros(3), 1))
    assert rows.fill(1, pack_parts(other)) is None
    assert rows.copy(1, memoryview(pack(other))) is None


@given(st.binary(max_size=200))
def test_bytes_of_nonsense_fill_no_row(nonsense: bytes) -> None:
    rows = BatchBuffer(2)
    rows.place(0, (torch.zeros(3), 1))
    assert rows.copy(1, memoryview(nonsense)) is None
    assert rows.copy(1, memoryview(pack((torch.zeros(3), 1))[:12] + nonsense)) is None


def test_names_that_are_numbers_are_names() -> None:
    rows = BatchBuffer(2)
    rows.place(0, ({1: torch.zeros(3), 2: 5}, 1))
    assert rows.fill(1, pack_parts(({1: torch.zeros(3), 3: 5}, 1))) is None
    assert rows.fill(1, pack_parts(({1: torch.ones(3), 2: 6}, 7))) is not None
    inputs, target = rows.pair()
    assert inputs[2].tolist() == [5, 6] and target.tolist() == [1, 7]
    assert inputs[1].tolist() == [[0.0] * 3, [1.0] * 3]
