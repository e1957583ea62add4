"""Servers hold their share, and no more moves than a change needs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sync.server.placement import place_keys

SIZES = st.lists(st.integers(0, 9) | st.integers(0, 1000), max_size=40)
SERVERS = st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True)


def check(sizes: Sequence[int], servers: Sequence[int], holders: Sequence[int]) -> None:
    """Each key is somewhere, and loads keep their bounds."""
    assert len(holders) == len(sizes)
    held = dict.fromkeys(servers, 0)
    for size, holder in zip(sizes, holders, strict=True):
        held[holder] += size
    total, largest, num = sum(sizes), max(sizes, default=0), len(servers)
    assert max(held.values()) * num <= total + largest * num
    assert max(held.values()) - min(held.values()) <= largest


def moved(sizes: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
    """Bytes that a server holds now and did not hold before."""
    return sum(size for size, old, new in zip(sizes, before, after, strict=True) if old != new)


@given(SIZES, SERVERS)
def test_servers_hold_their_share(sizes: list[int], servers: list[int]) -> None:
    holders = place_keys(sizes, servers)
    check(sizes, servers, holders)
    assert place_keys(sizes, servers[::-1]) == holders, "the same, in whatever order they came"
    assert place_keys(sizes, servers, holders) == holders, "nothing to do, nothing done"


@given(SIZES, SERVERS, st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=8))
def test_no_more_moves_than_a_change_needs(
    sizes: list[int], servers: list[int], changes: list[tuple[bool, int]]
) -> None:
    """Servers come and go, one by one."""
    holders = place_keys(sizes, servers)
    for comes, number in changes:
        before = holders
        if comes and number not in servers:
            servers = [*servers, number]
            holders = place_keys(sizes, servers, before)
            fair = sum(sizes) // len(servers)
            assert moved(sizes, before, holders) <= fair + max(sizes, default=0)
        elif not comes and len(servers) > 1:
            gone = servers[number % len(servers)]
            servers = [server for server in servers if server != gone]
            holders = place_keys(sizes, servers, before)
            lost = sum(size for size, old in zip(sizes, before, strict=True) if old == gone)
            assert moved(sizes, before, holders) <= lost
        check(sizes, servers, holders)


@given(SIZES, SERVERS, st.data())
def test_any_placement_is_brought_into_balance(sizes: list[int], servers: list[int], data) -> None:
    """Also with new keys among the old."""
    numbers = st.none() | st.integers(0, 99) | st.sampled_from(servers)
    before = [data.draw(numbers) for _ in sizes]
    check(sizes, servers, place_keys(sizes, servers, before))


@pytest.mark.parametrize("servers", [[], [1, 1, 2]])
def test_servers_without_numbers_of_their_own_are_refused(servers: list[int]) -> None:
    with pytest.raises(ValueError, match="a number of its own"):
        place_keys([1, 2, 3], servers)
