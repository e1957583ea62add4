"""Servers that keep each other's shards, over real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.comm.endpoint import Endpoint
from shoal.errors import ShoalError
from shoal.sync.server.loop import ServerLoop
from shoal.sync.server.peers import Peers, make_peers
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard, layout_of
from shoal.sync.server.tables import ServerTables
from tests.unit.sync.server.played import GENERATION, SECRET


def shard_of(number: int) -> ServerShard:
    """One of two servers': a few parameters, and a table of one row, which the first one has."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(1, 4, sparse=True), nn.Linear(4, 2))
    tables = ServerTables(model, number, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return ServerShard(model, optimizer, layout_of(model, optimizer, 2), number, tables)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[tuple[Server, Peers]]]:
    """Both have all of each other."""
    made, desks, reach = [], [], Endpoint(str(tmp_path))
    for number in range(2):
        server = Server(shard_of(number), num_seats=1, num_pieces=1, bound=0, secret=SECRET)
        server.begin(GENERATION)
        peers = make_peers(server, number, 2, 2, shard_of, reach)
        assert peers is not None
        made.append((server, peers))
        desks.append(ServerLoop(server, reach, peers))
    for _, peers in made:
        peers.start_generation(GENERATION, [other.address for _, other in made])
    while any(peers.leader.is_waiting() for _, peers in made):
        for loop in desks:
            loop.run_once()
    yield made
    for loop in desks:
        loop.close()


def test_all_take_as_much_from_one_another(pair) -> None:
    (first, own), (second, other) = pair
    assert first.parameters.tables.num_bytes > second.parameters.tables.num_bytes == 0
    assert own._most_bytes == other._most_bytes


def test_a_state_that_nobody_would_take_ends_the_run_with_a_way_out(pair, monkeypatch) -> None:
    server, peers = pair[0]
    monkeypatch.setattr(peers, "_most_bytes", 20)
    with pytest.raises(ShoalError, match=r"has \d+ bytes, and servers take 20 .* copies=1"):
        peers.begin(*server.snapshot())
