"""Rows of a table are dealt to servers: each to one, evenly, in few stripes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.layout import WHOLE
from shoal.parallel.striping import MOST_STRIPES, Stripes, Striping


@given(st.integers(1, 500), st.integers(1, 70))
def test_each_row_stands_on_one_server_at_the_place_that_is_said(rows: int, servers: int) -> None:
    striping = Striping(rows, servers)
    ids = torch.arange(rows)
    holders, places = striping.servers_of(ids), striping.places_of(ids)
    held = [[row for stripe in striping.stripes_of(s) for row in stripe] for s in range(servers)]
    assert sum(map(len, held)) == rows
    assert sum(len(striping.stripes_of(s)) for s in range(servers)) <= MOST_STRIPES
    for row, holder, place in zip(range(rows), holders.tolist(), places.tolist(), strict=True):
        assert held[holder][place] == row


@given(st.integers(1, 300), st.integers(1, 5))
def test_parts_of_all_servers_are_the_table(rows: int, servers: int) -> None:
    table = torch.arange(2 * rows).view(rows, 2)
    made = torch.full_like(table, -1)
    striping = Striping(rows, servers)
    for server in range(servers):
        stripes = striping.stripes_of(server)
        own = torch.cat([table[:0], *(table[s.start : s.stop] for s in stripes)])
        for part in Stripes("table", rows, stripes).parts(own, WHOLE):
            assert part.global_shape == (rows, 2)
            made[part.offset[0] : part.offset[0] + len(part.tensor)] = part.tensor
    assert torch.equal(made, table)
