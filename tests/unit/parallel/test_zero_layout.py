"""Who owns which elements: all of them once, in cuts that keep the blocks of a norm whole."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.numerics.norms import BLOCK
from shoal.parallel.zero_layout import (
    ALIGNMENT,
    FlatBuffer,
    lay_out_buffers,
    shard_evenly,
    shard_whole,
    starts_of,
)

LENGTHS = st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


@given(LENGTHS)
def test_parameters_stand_apart_and_aligned(lengths: list[int]) -> None:
    starts = starts_of(lengths)
    assert starts[0] == 0 and len(starts) == len(lengths) + 1
    for length, (start, following) in zip(lengths, pairwise(starts), strict=True):
        assert start % ALIGNMENT == 0
        assert 0 <= following - start - length < ALIGNMENT


@given(LENGTHS, RANKS)
def test_cuts_keep_blocks_whole_and_shards_even(lengths: list[int], num_ranks: int) -> None:
    starts = starts_of(lengths)
    cuts = shard_evenly(starts, lengths, num_ranks)
    assert cuts == sorted(cuts) and (cuts[0], cuts[-1]) == (0, starts[-1])
    assert len(cuts) == num_ranks + 1
    for rank, cut in enumerate(cuts):
        start = max(s for s in starts if s <= cut)
        assert (cut - start) % BLOCK == 0
        assert abs(cut - starts[-1] * rank / num_ranks) <= BLOCK / 2 + ALIGNMENT
    sizes = [stop - start for start, stop in pairwise(cuts)]
    assert max(sizes) <= starts[-1] / num_ranks + BLOCK + 2 * ALIGNMENT


@given(LENGTHS, RANKS)
def test_segments_cover_every_element_once(lengths: list[int], num_ranks: int) -> None:
    starts, numbers = starts_of(lengths), [10 * i for i in range(len(lengths))]
    seen: dict[int, list[tuple[int, int]]] = {number: [] for number in numbers}
    cuts = shard_evenly(starts, lengths, num_ranks)
    shelf = FlatBuffer(numbers, lengths, starts, cuts)
    for rank, (begin, end) in enumerate(pairwise(cuts)):
        for segment in shelf.segments(rank):
            assert begin <= segment.place and segment.start % BLOCK == 0
            assert segment.place + segment.length <= end
            assert segment.place - segment.start == starts[numbers.index(segment.parameter)]
            seen[segment.parameter].append((segment.start, segment.stop))
    for number, length in zip(numbers, lengths, strict=True):
        ends = [end for run in seen[number] for end in run]
        assert ends[0] == 0 and ends[-1] == length
        assert ends[1:-1:2] == ends[2:-1:2], "each run begins where the one before it ends"


@given(st.lists(st.integers(1, 1000), max_size=20), RANKS)
def test_whole_buffers_go_to_the_least_laden(sizes: list[int], num_ranks: int) -> None:
    owners = shard_whole(sizes, num_ranks)
    assert len(owners) == len(sizes) and all(0 <= owner < num_ranks for owner in owners)
    load = [0] * num_ranks
    for owner, size in zip(owners, sizes, strict=True):
        load[owner] += size
    assert max(load) - min(load) <= max(sizes, default=0)


SIZES = st.lists(st.tuples(st.integers(1, 5 * BLOCK), st.sampled_from([2, 4])), max_size=20)


@given(SIZES, RANKS, st.booleans())
def test_shelves_hold_every_parameter_once(sizes, num_ranks: int, may_cut: bool) -> None:
    shelves = lay_out_buffers([(length, size, size) for length, size in sizes], num_ranks, may_cut)
    held = [i for shelf in shelves for i in shelf.indices]
    assert held == list(reversed(range(len(sizes))))
    for shelf in shelves:
        assert len({sizes[i][1] for i in shelf.indices}) == 1
        assert sum(shelf.shards) == shelf.starts[-1] and len(shelf.shards) == num_ranks
        parts = [s for rank in range(num_ranks) for s in shelf.segments(rank)]
        assert sum(s.length for s in parts) == sum(shelf.lengths)
        if not may_cut:
            assert sorted(shelf.shards)[:-1] == [0] * (num_ranks - 1)
            assert len(parts) == len(shelf.indices)
