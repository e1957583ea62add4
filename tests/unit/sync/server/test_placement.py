"""Servers hold their share, and no more moves than a change needs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sync.server.placement import place

Holders = list[tuple[int, ...]]
SIZES = st.lists(st.integers(0, 9) | st.integers(0, 1000), max_size=40)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Sizes, servers with any numbers, and how many copies."""
    servers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True))
    return draw(SIZES), servers, draw(st.integers(1, min(4, len(servers))))


def check(sizes: Sequence[int], servers: Sequence[int], copies: int, holders: Holders) -> None:
    """All copies exist, each on a server of its own, and loads keep their bounds."""
    assert len(holders) == len(sizes)
    held, answered = dict.fromkeys(servers, 0), dict.fromkeys(servers, 0)
    for size, own in zip(sizes, holders, strict=True):
        assert len(own) == len(set(own)) == copies
        answered[own[0]] += size
        for server in own:
            held[server] += size
    total, largest, num = sum(sizes), max(sizes, default=0), len(servers)
    assert max(held.values()) * num <= copies * total + largest * num
    assert max(held.values()) - min(held.values()) <= largest
    assert max(answered.values()) * num <= total + largest * num


def moved(sizes: Sequence[int], before: Holders, after: Holders) -> int:
    """Bytes that a server holds now and did not hold before."""
    return sum(
        size * len(set(new) - set(old)) for size, old, new in zip(sizes, before, after, strict=True)
    )


@given(fleets())
def test_servers_hold_and_answer_for_their_share(fleet) -> None:
    sizes, servers, copies = fleet
    holders = place(sizes, servers, copies)
    check(sizes, servers, copies, holders)
    assert place(sizes, servers[::-1], copies) == holders, "the same, in whatever order they came"
    assert place(sizes, servers, copies, holders) == holders, "nothing to do, nothing done"


@given(fleets(), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=8))
def test_no_more_moves_than_a_change_needs(fleet, changes: list[tuple[bool, int]]) -> None:
    """Servers come and go, one by one."""
    sizes, servers, copies = fleet
    largest = max(sizes, default=0)
    holders = place(sizes, servers, copies)
    for comes, number in changes:
        before = holders
        if comes and number not in servers:
            servers = [*servers, number]
            holders = place(sizes, servers, copies, before)
            fair = copies * sum(sizes) // len(servers)
            assert moved(sizes, before, holders) <= fair + largest
        elif not comes and len(servers) > copies:
            gone = servers[number % len(servers)]
            servers = [server for server in servers if server != gone]
            holders = place(sizes, servers, copies, before)
            lost = sum(size for size, own in zip(sizes, before, strict=True) if gone in own)
            # One copy can go anywhere; of several, some servers hold the others already.
            assert moved(sizes, before, holders) <= lost + (copies > 1) * 3 * largest
        check(sizes, servers, copies, holders)


@given(fleets(), st.data())
def test_any_placement_is_brought_into_balance(fleet, data) -> None:
    """Also with new keys among the old, and another number of copies than before."""
    sizes, servers, copies = fleet
    numbers = st.lists(st.integers(0, 99) | st.sampled_from(servers), unique=True, max_size=4)
    before = [tuple(data.draw(numbers)) for _ in sizes]
    check(sizes, servers, copies, place(sizes, servers, copies, before))


def test_a_copy_is_promoted_when_the_first_is_gone() -> None:
    before = place([1] * 12, range(4), copies=2)
    after = place([1] * 12, range(1, 4), copies=2, before=before)
    for old, new in zip(before, after, strict=True):
        assert set(old) - {0} <= set(new)
        if old[0] == 0:
            assert new[0] == old[1]


def test_a_server_that_answers_for_too_much_passes_on_through_others() -> None:
    """The holder beside it has its share already, but can give some of that away in its turn."""
    before = [(2, 0), (3, 2), (4, 1), (3, 4)]
    after = place([1] * 4, range(5), copies=2, before=before)
    check([1] * 4, range(5), 2, after)
    assert moved([1] * 4, before, after) == 0


def test_all_others_take_over_from_a_server_that_is_lost() -> None:
    holders = place([1] * 60, range(5), copies=2)
    partners = [sum({0, other} == set(own) for own in holders) for other in range(1, 5)]
    assert max(partners) - min(partners) <= 1 and sum(partners) == 24


@pytest.mark.parametrize(("servers", "copies"), [([], 1), ([1, 2], 3), ([1, 2], 0), ([1, 1, 2], 2)])
def test_copies_without_a_server_each_are_refused(servers: list[int], copies: int) -> None:
    with pytest.raises(ValueError, match="start more servers, or ask for fewer copies"):
        place([1, 2, 3], servers, copies)
