"""What all readers share: indexes from either end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.readers.records import normalize_indices
from shoal.data.sources import normalize_index


@given(st.integers(1, 9), st.lists(st.integers(-9, 8)))
def test_many_positions_are_those_of_each(length: int, wanted: list[int]) -> None:
    inside = [index for index in wanted if -length <= index < length]
    expected = [normalize_index(index, length) for index in inside]
    assert normalize_indices(np.array(inside, dtype=np.int64), length).tolist() == expected
    assert normalize_indices(inside, length).tolist() == expected
    if inside != wanted:
        with pytest.raises(IndexError, match=f"of {length}"):
            normalize_indices(np.array(wanted, dtype=np.int64), length)


def test_an_index_is_a_whole_number() -> None:
    for wrong in (0.5, "0", slice(1)):
        with pytest.raises(TypeError):
            normalize_indices([wrong], 3)  # type: ignore[list-item]
