"""Collectives, sums in the tree's order, shared state and broken groups, on real ranks."""

import json
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.collectives import LOOK, Group
from shoal.comm.flight_recorder import RECORDER
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import TreeReduce
from shoal.comm.rendezvous import join_store, serve_store, wait_for_ranks
from shoal.comm.sockets import open_sockets, shut_down
from shoal.comm.tree import Block, blocks_of, fold
from shoal.data.split import share
from shoal.errors import FormError, GroupLost
from shoal.parallel.layout import whole_slice
from shoal.sync.state import ShardedState, broadcast_bytes, broadcast_state
from shoal.testing.ranks import Pool
from shoal.world import World

LENGTHS = [1, 2, 5, 1000, 40_000]  # the last one does not go at once


def values(num_pieces: int, length: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(num_pieces * 1000 + length)
    return [torch.randn(length, generator=draws) * 10.0 ** (i % 6) for i in range(num_pieces)]


def tree_sum(mesh: Mesh, num_pieces: int) -> list[torch.Tensor]:
    group = mesh.data
    blocks = [
        blocks_of(share(rank, group.num_ranks, num_pieces)) for rank in range(group.num_ranks)
    ]
    tree = TreeReduce(group, blocks)
    reductions = []
    for length in LENGTHS:
        of = values(num_pieces, length)
        rows = [folded(of, block) for block in blocks[group.rank]]
        reductions.append(tree.start(rows))
    for reduction in reductions:
        reduction.fold()
    return [reduction.finish() for reduction in reductions]


def folded(of: list[torch.Tensor], block: Block) -> torch.Tensor:
    leaves = {Block(i, 1): of[block.first + i] for i in range(block.num_pieces)}
    return fold(leaves, block.num_pieces, torch.add).clone()


@pytest.mark.parametrize(("num_ranks", "num_pieces"), [(2, 2), (2, 4), (2, 6), (3, 4), (4, 6)])
def test_sums_have_the_bits_of_one_process(pool: Pool, num_ranks: int, num_pieces: int) -> None:
    expected = [
        fold(
            dict(zip([Block(i, 1) for i in range(num_pieces)], values(num_pieces, n))),
            num_pieces,
            torch.add,
        )
        for n in LENGTHS
    ]
    for answer in pool.run(tree_sum, num_ranks, num_pieces):
        assert all(torch.equal(a, b) for a, b in zip(answer, expected, strict=True))


def collectives(mesh: Mesh) -> dict[str, Any]:
    group, rank = mesh.data, mesh.rank
    summed = torch.full((3,), float(rank + 1))
    group.all_reduce(summed).wait()
    shards = [torch.full((2,), float(r)) if r == rank else torch.zeros(2) for r in range(3)]
    group.all_gather_shards(shards).wait()
    copied = torch.full((2,), float(rank))
    group.broadcast(copied, source=2)
    before = group.bytes_sent
    numbers = group.all_gather_numbers([float(rank), 0.1 * rank])
    return {
        "summed": summed,
        "shards": torch.cat(shards),
        "copied": copied,
        "numbers": numbers,
        "counted": group.bytes_sent > before > 0,
    }


def test_collectives(pool: Pool) -> None:
    for answer in pool.run(collectives, 3):
        assert answer["summed"].tolist() == [6.0] * 3
        assert answer["shards"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert answer["copied"].tolist() == [2.0, 2.0]
        assert answer["numbers"] == [[float(r), 0.1 * r] for r in range(3)]
        assert answer["counted"]


def recorded(mesh: Mesh) -> int:
    for _ in range(3):
        mesh.data.all_reduce(torch.ones(4)).wait()
    record = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True))
    return len(record.get("entries", []))


def test_messages_leave_nothing_behind(pool: Pool) -> None:
    """torch's record of them would pin freed memory between activations."""
    assert pool.run(recorded, 2) == [0, 0]


def shares_state(mesh: Mesh) -> dict[str, Any]:
    tensors = {
        "model.a": [whole_slice(torch.full((2, 3), float(mesh.rank)))],
        "optimizer.a.step": [whole_slice(torch.tensor(mesh.rank))],
        "number.x": [whole_slice(torch.tensor([mesh.rank], dtype=torch.uint8))],
        "half": [whole_slice(torch.full((3,), mesh.rank, dtype=torch.bfloat16))],
    }
    got = broadcast_state(mesh.data, 1, ShardedState(tensors, {"rank": mesh.rank}))
    content = broadcast_bytes(mesh.data, 2, f"from {mesh.rank}".encode() * (mesh.rank + 1))
    tensors = {name: part.tensor for name, (part,) in got.tensors.items()}
    return {"state": tensors, "plain": got.plain, "bytes": content}


def test_a_state_goes_from_one_rank_to_all(pool: Pool) -> None:
    for answer in pool.run(shares_state, 3):
        assert answer["state"]["model.a"].tolist() == [[1.0] * 3] * 2
        assert answer["state"]["optimizer.a.step"].item() == 1
        assert answer["state"]["half"].dtype == torch.bfloat16
        assert answer["plain"] == {"rank": 1}
        assert answer["bytes"] == b"from 2" * 3


def waits_for_a_late_peer(mesh: Mesh) -> float:
    """Several looks pass before the sum is there; a look that ends early breaks nothing."""
    ones = torch.ones(50_000)
    if mesh.rank:
        time.sleep(2.2 * LOOK.total_seconds())
    mesh.data.all_reduce(ones).wait()
    return float(ones.sum())


def test_a_late_peer_is_waited_for(pool: Pool) -> None:
    assert pool.run(waits_for_a_late_peer, 2) == [100_000.0, 100_000.0]


def leaves_a_dead_collective(mesh: Mesh, through_memory: bool) -> str:
    """Rank 1 never comes: the others are freed by shutting their own sockets, or by the end of the
    generation where they wait in memory."""
    if mesh.rank == 1:
        time.sleep(2.0)
        return "absent"
    is_over = threading.Event()
    world = dist.group.WORLD if not through_memory else mesh.data.handle
    group = Group(world, is_lost=is_over.is_set)
    names = set(open_sockets())
    end = is_over.set if through_memory else partial(shut_down, names)
    freed = threading.Timer(0.3, end)
    freed.start()
    try:
        group.all_reduce(torch.ones(10)).wait()
        return "done"
    except GroupLost:
        return "freed"
    finally:
        freed.join()


@pytest.mark.parametrize("through_memory", [False, True])
def test_a_waiting_collective_can_be_left(pool: Pool, through_memory: bool) -> None:
    assert pool.run(leaves_a_dead_collective, 2, through_memory) == ["freed", "absent"]


def notices_a_death(mesh: Mesh) -> str:
    if mesh.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(GroupLost):
        for _ in range(100):
            mesh.data.all_reduce(torch.ones(1000)).wait()
    raise ValueError("the survivor saw it as GroupLost")


def test_a_killed_peer_is_a_lost_group(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="the survivor saw it as GroupLost"):
        pool.run(notices_a_death, 3)


def test_a_rank_that_does_not_come_is_named() -> None:
    store, port = serve_store()
    try:
        joined = join_store("127.0.0.1", port, timeout_s=5.0)
        with pytest.raises(FormError, match="rank 1, 2 did not come"):
            wait_for_ranks(joined, "test", World(0, 3, 0, 3), timeout_s=0.2)
        del joined
    finally:
        del store


def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(FormError, match=r"No store answers at 127\.0\.0\.1:1 "):
        join_store("127.0.0.1", 1, timeout_s=0.5)


def test_a_group_of_one_is_silent() -> None:
    group = Group()
    assert (group.rank, group.num_ranks, group.bytes_sent) == (0, 1, 0)


def parts_in_turn(mesh: Mesh) -> list[float]:
    """A part that only some are in, and then one of all."""
    found = []
    for ranks in ([0, 2], [0, 1, 2]):
        total = torch.ones(())
        mesh.world.subgroup(ranks).all_reduce(total).wait()
        found.append(float(total))
    return found


def test_a_part_of_some_is_no_hindrance_to_the_next(pool: Pool) -> None:
    assert pool.run(parts_in_turn, 3) == [[2.0, 3.0], [1.0, 3.0], [2.0, 3.0]]


def seconds_blocked(mesh: Mesh, is_gloo: bool) -> float:
    """Of a rank, in an exchange to which rank 1 comes late."""
    group = Group(dist.group.WORLD) if is_gloo else mesh.world
    group.all_gather_numbers([0.0])
    before = RECORDER.blocked.seconds
    if mesh.rank == 1:
        time.sleep(0.4)
    group.all_reduce(torch.ones(3)).wait()
    return RECORDER.blocked.seconds - before


@pytest.mark.parametrize("is_gloo", [False, True])
def test_the_time_that_a_rank_is_blocked_is_counted(pool: Pool, is_gloo: bool) -> None:
    early, late = pool.run(seconds_blocked, 2, is_gloo)
    assert early > 0.2 > late
