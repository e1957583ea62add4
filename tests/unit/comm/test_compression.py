"""Shares of a packed vector: whole blocks, all of it, and as even as blocks allow."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.compression import share_bounds


@given(st.integers(0, 5000), st.sampled_from([1, 256]), st.integers(1, 9))
def test_shares_are_whole_blocks_and_even(length: int, block: int, num_ranks: int) -> None:
    cuts = share_bounds(length, block, num_ranks)
    assert cuts[0] == 0 and cuts[-1] == length and len(cuts) == num_ranks + 1
    assert all(cut % block == 0 or cut == length for cut in cuts)
    lengths = [stop - start for start, stop in pairwise(cuts)]
    assert min(lengths) >= 0 and max(lengths) < length / num_ranks + 2 * block
