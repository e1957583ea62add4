"""How ranks that hold the same share out what they bring to other replicas."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.sync.averaging import stripe_bounds


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([1, 256, 1024]))
def test_stripes_cover_all_in_whole_blocks_and_none_is_empty(
    count: int, num_ranks: int, block: int
) -> None:
    bounds = stripe_bounds(count, num_ranks, block)
    assert bounds[0] == 0 and bounds[-1] == count
    assert len(bounds) in (2, num_ranks + 1)
    if len(bounds) > 2:
        assert all(a < b for a, b in pairwise(bounds))
        assert all(bound % block == 0 for bound in bounds[:-1])
        lengths = [b - a for a, b in pairwise(bounds)]
        assert max(lengths) - min(lengths) <= 2 * block
