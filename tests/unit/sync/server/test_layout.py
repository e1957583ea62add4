"""Where elements stand: each in one place, held by one server, alike for all who compute it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm import buckets
from shoal.sync.server import layout
from shoal.sync.server.layout import ALIGNMENT, ServerLayout, make_layout

SIZES = st.lists(
    st.tuples(st.integers(1, 5000), st.sampled_from([2, 4, 8])).map(lambda s: (*s, s[1])),
    min_size=1,
    max_size=6,
)


@pytest.fixture(autouse=True, scope="module")
def small_keys():
    """So that small parameters are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BUCKET_BYTES", 4096)
        yield


@given(SIZES, st.booleans(), st.integers(1, 5))
def test_each_element_has_one_place(sizes, may_cut: bool, num_servers: int) -> None:
    found = make_layout(sizes, may_cut, num_servers)
    seen: list[set[int]] = [set() for _ in sizes]
    for key, own in enumerate(found.keys):
        for s in found.segments(key):
            assert s.place >= 0 and s.place + s.length <= own.stop - own.start
            assert seen[s.parameter].isdisjoint(range(s.start, s.stop))
            seen[s.parameter] |= set(range(s.start, s.stop))
            assert may_cut or s.length == sizes[s.parameter][0], "cut, and may not be"
            assert sizes[s.parameter][1] == own.itemsize
    assert [len(elements) for elements in seen] == [length for length, _, _ in sizes]


@given(SIZES, st.booleans(), st.integers(1, 5), st.integers(1, 4))
def test_each_key_has_a_holder_and_a_place(sizes, may_cut, num_servers: int, num_rows) -> None:
    found = make_layout(sizes, may_cut, num_servers)
    held = sorted(key for server in range(num_servers) for key in found.held_by(server))
    assert held == list(range(len(found.keys)))
    assert held == sorted(
        k for shelf in range(len(found.flat_buffers)) for k in found.keys_of_buffer(shelf)
    )
    places = found.row_places(num_rows)
    for shelf, (start, stop) in enumerate(pairwise(places)):
        needed = num_rows * found.flat_buffers[shelf].starts[-1] * found.itemsizes[shelf]
        assert start % ALIGNMENT == 0 and start + needed <= stop
    for server in range(num_servers):
        at = found.value_places(server)
        for key, start, stop in zip(found.held_by(server), at, at[1:]):
            assert start % ALIGNMENT == 0 and start + found.keys[key].num_bytes <= stop


@given(SIZES, st.booleans(), st.integers(1, 5))
def test_two_who_mean_the_same_have_the_same_digest(sizes, may_cut, num_servers: int) -> None:
    found = make_layout(sizes, may_cut, num_servers)
    assert make_layout(list(sizes), may_cut, num_servers).digest == found.digest
    longer = [(sizes[0][0] + 1, *sizes[0][1:]), *sizes[1:]]
    others: list[ServerLayout] = [
        make_layout(longer, may_cut, num_servers),
        make_layout([*sizes, (8, 4, 4)], may_cut, num_servers),
    ]
    assert all(other.digest != found.digest for other in others)


def test_parameters_are_spread_over_servers() -> None:
    found = make_layout([(100_000, 4, 4)], True, 4)
    loads = [sum(found.keys[k].num_bytes for k in found.held_by(s)) for s in range(4)]
    assert min(loads) * 2 > max(loads)
    assert max(key.num_bytes for key in found.keys) <= 2 * layout.BUCKET_BYTES
    assert buckets.BUCKET_BYTES != layout.BUCKET_BYTES, "the fixture made keys small"
