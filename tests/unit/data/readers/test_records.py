"""What all readers share: indexes from either end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.readers.records import positions
from shoal.data.sources import position


@given(st.integers(1, 9), st.lists(st.integers(-9, 8)))
def test_many_positions_are_those_of_each(length: int, wanted: list[int]) -> None:
    inside = [index for index in wanted if -length <= index < length]
    expected = [position(index, length) for index in inside]
    assert positions(np.array(inside, dtype=np.int64), length).tolist() == expected
    assert positions(inside, length).tolist() == expected
    if inside != wanted:
        with pytest.raises(IndexError, match=f"of {length}"):
            positions(np.array(wanted, dtype=np.int64), length)


def test_an_index_is_a_whole_number() -> None:
    for wrong in (0.5, "0", slice(1)):
        with pytest.raises(TypeError):
            positions([wrong], 3)  # type: ignore[list-item]
