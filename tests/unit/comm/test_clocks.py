"""The offset of two clocks, from what each showed around rounds in which both took part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.clocks import offset_of

delays = st.floats(1e-6, 0.5)
rounds = st.lists(st.tuples(delays, delays, delays, delays), min_size=1, max_size=8)


@given(rounds, st.floats(-1e6, 1e6))
def test_the_error_is_at_most_half_the_fastest_round(delays_of_rounds, offset: float) -> None:
    now, theirs, own, widths = 0.0, [], [], []
    for before_0, before_r, after_0, after_r in delays_of_rounds:
        met = now + before_0 + before_r  # when both had begun
        theirs.append((now, met + after_0))
        own.append((now + before_0 + offset, met + after_r + offset))
        widths.append(own[-1][1] - theirs[-1][0] - (own[-1][0] - theirs[-1][1]))
        now = met + after_0 + after_r
    found = offset_of(theirs, own)
    assert abs(found - offset) <= min(widths) + 1e-6


def test_the_same_clock_has_no_offset() -> None:
    assert offset_of([(0.0, 2.0), (3.0, 4.0)], [(1.0, 2.5), (3.1, 4.2)]) == 0.0
    assert offset_of([(0.0, 2.0)], [(101.0, 102.5)]) == pytest.approx(100.75)
