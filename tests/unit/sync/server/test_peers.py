"""Servers that keep each other's shards, over real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.comm.reach import Reach
from shoal.errors import ShoalError
from shoal.sync.server.peers import Peers, copied
from shoal.sync.server.serve import Desk
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard, layout_of
from shoal.sync.server.tables import Tables
from tests.unit.sync.server.played import GENERATION, SECRET


def shard_of(number: int) -> Shard:
    """One of two servers': a few parameters, and a table of one row, which the first one has."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(1, 4, sparse=True), nn.Linear(4, 2))
    tables = Tables(model, number, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Shard(model, optimizer, layout_of(model, optimizer, 2), number, tables)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[tuple[Server, Peers]]]:
    """Both have all of each other."""
    made, desks, reach = [], [], Reach(str(tmp_path))
    for number in range(2):
        server = Server(shard_of(number), num_seats=1, num_pieces=1, bound=0, secret=SECRET)
        server.begin(GENERATION)
        peers = copied(server, number, 2, 2, shard_of, reach)
        assert peers is not None
        made.append((server, peers))
        desks.append(Desk(server, reach, peers))
    for _, peers in made:
        peers.turn_to(GENERATION, [other.address for _, other in made])
    while any(peers.leader.is_waiting() for _, peers in made):
        for desk in desks:
            desk.turn()
    yield made
    for desk in desks:
        desk.close()


def test_all_take_as_much_from_one_another(pair) -> None:
    (first, own), (second, other) = pair
    assert first.held.tables.num_bytes > second.held.tables.num_bytes == 0
    assert own._most_bytes == other._most_bytes


def test_a_state_that_nobody_would_take_ends_the_run_with_a_way_out(pair, monkeypatch) -> None:
    server, peers = pair[0]
    monkeypatch.setattr(peers, "_most_bytes", 20)
    with pytest.raises(ShoalError, match=r"has \d+ bytes, and servers take 20 .* copies=1"):
        peers.begin(*server.snapshot())
