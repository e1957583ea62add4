"""Keys that change hands: no more than must, whole, and with the bits that they had."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.sync.server.layout import make_layout
from shoal.sync.server.migration import (
    LayoutFiles,
    layout_after,
    load_parts,
    rebalance,
    remove_parts,
    without_repeats,
    write_parts,
)
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard
from tests.unit.sync.server.played import (
    SECRET,
    Worker,
    make_model,
    make_optimizer,
    push_all,
    send,
)

SIZES = st.lists(st.tuples(st.integers(1, 5000), st.just(4), st.just(4)), min_size=1, max_size=12)


@given(SIZES, st.lists(st.integers(1, 8), min_size=2, max_size=5))
def test_only_what_must_move_does(sizes, counts: list[int]) -> None:
    layout = make_layout(sizes, True, counts[0])
    bytes_of = [key.num_bytes for key in layout.keys]
    largest, total = max(bytes_of), sum(bytes_of)
    for before, after in pairwise(counts):
        old, layout = layout, rebalance(layout, after)
        assert layout.keys == old.keys and layout.flat_buffers == old.flat_buffers
        assert all(0 <= holder < after for holder in layout.holders)
        held = [sum(bytes_of[k] for k in layout.held_by(server)) for server in range(after)]
        assert max(held) - min(held) <= largest, "sizes are even"
        moved = [k for k, ends in enumerate(zip(old.holders, layout.holders)) if len({*ends}) > 1]
        needed = sum(bytes_of[k] for server in range(after, before) for k in old.held_by(server))
        if after > before:
            needed = total * (after - before) / after
        spare = largest * max(before, after)
        assert sum(bytes_of[key] for key in moved) <= needed + spare
        assert after != before or not moved


def test_what_is_as_before_is_no_change() -> None:
    assert without_repeats([2, 2, 3, 3, 2]) == [2, 3, 2]
    model = make_model()
    optimizer = make_optimizer(model)
    one = layout_after(model, optimizer, [2, 2, 3])
    assert one == layout_after(model, optimizer, [2, 3, 3])
    assert one.digest == layout_after(model, optimizer, [2, 3]).digest


def make(number: int, counts: list[int], kind: str = "adam", bound: int | None = 0) -> Server:
    model = make_model()
    optimizer = make_optimizer(model, kind)
    shard = ServerShard(model, optimizer, layout_after(model, optimizer, counts), number)
    return Server(shard, num_seats=1, num_pieces=1, bound=bound, secret=SECRET)


def train(servers: list[Server], batches: range) -> None:
    for server in servers:
        worker = Worker(0, server)
        worker.generation = server.generation
        worker.settings = [{"lr": 0.1}]
        send(server, worker, worker.hello())
        for batch in batches:
            push_all(server, worker, batch, float(batch + 1))
            send(server, worker, worker.apply(batch))
        assert server.clock.committed == batches.stop


def elements(servers: list[Server]) -> dict[str, torch.Tensor]:
    """All that they hold, by name: values and the optimizer's state."""
    found: dict[str, torch.Tensor] = {}
    for server in servers:
        for name, parts in server.shard.state_dict().tensors.items():
            for part in parts:
                whole = found.setdefault(name, torch.full(part.global_shape, torch.nan))
                where = tuple(slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape))
                whole[where] = part.tensor
    return found


def hand_over(servers: list[Server], counts: list[int], directory: Path) -> list[Server]:
    """The servers of the last count, begun with what those of the one before wrote down."""
    shelf = LayoutFiles(directory, len(counts) - 1)
    for number, server in enumerate(servers):
        write_parts(server, number, counts[-1], shelf)
    made = [make(number, counts, bound=servers[0].bound) for number in range(counts[-1])]
    for number, server in enumerate(made):
        load_parts(server, number, counts[-2], shelf)
        remove_parts(shelf, number, counts[-2], counts[-1])
    assert not list(directory.iterdir()), "nothing is left"
    return made


@pytest.mark.parametrize("counts", [[1, 2, 3, 1], [3, 1, 2], [2, 6, 2], [1, 9]])
@pytest.mark.parametrize("bound", [0, None])
def test_bits_are_handed_over(tmp_path: Path, counts: list[int], bound: int | None) -> None:
    """Also to servers that hold nothing, since there are more of them than keys."""
    steady = [make(number, counts[:1], bound=bound) for number in range(counts[0])]
    moving = [make(number, counts[:1], bound=bound) for number in range(counts[0])]
    for change in range(1, len(counts)):
        batches = range(3 * (change - 1), 3 * change)
        train(steady, batches)
        train(moving, batches)
        moving = hand_over(moving, counts[: change + 1], tmp_path)
        assert {server.clock.committed for server in moving} == {batches.stop}
        assert {server.version for server in moving} == {batches.stop}
        expected, found = elements(steady), elements(moving)
        assert found.keys() == expected.keys() and len(found) == 8
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_a_part_that_is_damaged_or_gone_is_not_gone_on_from(tmp_path: Path) -> None:
    servers = [make(number, [2]) for number in range(2)]
    train(servers, range(2))
    shelf = LayoutFiles(tmp_path, 1)
    for number, server in enumerate(servers):
        write_parts(server, number, 1, shelf)
    content = shelf.part(0, 1).read_bytes()
    shelf.part(0, 1).write_bytes(content[:-1])
    with pytest.raises(ShoalError, match=r"gone or damaged.*--resume"):
        load_parts(make(0, [2, 1]), 0, 2, shelf)
    shelf.part(0, 1).unlink()
    with pytest.raises(ShoalError, match=r"gone or damaged.*--resume"):
        load_parts(make(0, [2, 1]), 0, 2, shelf)


def test_servers_that_are_not_at_one_step_hand_nothing_over(tmp_path: Path) -> None:
    servers = [make(number, [2]) for number in range(2)]
    train(servers[:1], range(2))
    train(servers[1:], range(3))
    shelf = LayoutFiles(tmp_path, 1)
    for number, server in enumerate(servers):
        write_parts(server, number, 1, shelf)
    with pytest.raises(ShoalError, match=r"other steps.*--resume"):
        load_parts(make(0, [2, 1]), 0, 2, shelf)
