"""Shares and pieces: everything covered once, as evenly as it goes."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from shoal.data.split import bounds, share

counts = st.integers(1, 70)


@given(counts, counts)
def test_shares_cover_all_pieces_once_and_in_order(num_ranks: int, num_pieces: int) -> None:
    shares = [share(rank, num_ranks, num_pieces) for rank in range(num_ranks)]
    assert list(chain(*shares)) == list(range(num_pieces))
    sizes = {len(pieces) for pieces in shares}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 300), counts)
def test_bounds_cover_all_samples_and_the_larger_come_first(
    num_samples: int, num_pieces: int
) -> None:
    pieces = bounds(num_samples, num_pieces)
    assert len(pieces) == num_pieces
    assert list(chain(*(range(*piece) for piece in pieces))) == list(range(num_samples))
    sizes = [stop - start for start, stop in pieces]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_a_batch_that_divides_has_equal_pieces() -> None:
    assert bounds(32, 4) == [(0, 8), (8, 16), (16, 24), (24, 32)]


def test_fewer_samples_than_pieces_leave_the_last_empty() -> None:
    assert bounds(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]
