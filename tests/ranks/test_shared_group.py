"""Ranks that exchange through memory, and by hosts: the bits of Gloo, in any order of waiting.

Where ranks have hosts here, they believe it: what they send to one another goes over loopback.
"""

import os
import random
import re
import signal
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.comm import shared_group, shared_rounds
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import TreeReduce
from shoal.comm.shared_group import SharedGroup
from shoal.comm.shared_memory import NotShared, SharedSegment
from shoal.comm.tree import Block, fold
from shoal.errors import GroupLost
from shoal.testing.ranks import Pool

SLOT = shared_rounds.SLOT_BYTES // 4  # floats
LENGTHS = [0, 1, 7, SLOT - 1, SLOT + 1, 3 * SLOT * shared_rounds.RING + 5]


def draws(rank: int, length: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * length + rank)
    return torch.randint(-1000, 1000, (length,), generator=made).float()  # sums are exact


def formed(mesh: Mesh, hosts: str = "") -> Group:
    """The ranks as a group, on hosts of these names if there are any."""
    if not hosts:
        return mesh.data
    with mock.patch.object(shared_group, "this_host", lambda: hosts[mesh.rank]):
        return Group(dist.group.WORLD).subgroup(range(mesh.num_ranks))


def compares_with_gloo(mesh: Mesh, dtype: str, hosts: str = "") -> list[str]:
    """The collectives that differ."""
    ours, gloo, n = formed(mesh, hosts).handle, dist.group.WORLD, mesh.num_ranks
    assert isinstance(ours, SharedGroup) and gloo is not None
    wrong = []
    for length in LENGTHS:
        own = draws(mesh.rank, length).to(getattr(torch, dtype))
        whole = draws(mesh.rank, n * length).to(own.dtype)
        lengths = [length * (rank + 1) // 2 for rank in range(n)]
        parts = draws(mesh.rank, sum(lengths)).to(own.dtype)
        found: dict[str, list[torch.Tensor]] = {}
        for group in (ours, gloo):
            added, copied, largest = own.clone(), own.clone(), own.clone()
            rows = [torch.empty_like(own) for _ in range(n)]
            scattered = torch.empty_like(own)
            dealt = own.new_empty(n * lengths[mesh.rank])
            dist.all_reduce(added, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            dist.broadcast(copied, n - 1, group=group)
            dist.all_gather(rows, own, group=group)
            dist.reduce_scatter_tensor(scattered, whole, group=group)
            dist.all_to_all_single(dealt, parts, [lengths[mesh.rank]] * n, lengths, group=group)
            dist.barrier(group=group)
            found.setdefault("all-reduce", []).append(added)
            found.setdefault("largest", []).append(largest)
            found.setdefault("broadcast", []).append(copied)
            found.setdefault("all-gather", []).append(torch.cat(rows))
            found.setdefault("reduce-scatter", []).append(scattered)
            found.setdefault("all-to-all", []).append(dealt)
        wrong += [f"{k} of {length}" for k, (a, b) in found.items() if not torch.equal(a, b)]
    return wrong


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_collectives_give_what_gloo_gives(pool: Pool, num_ranks: int) -> None:
    assert not any(pool.run(compares_with_gloo, num_ranks, "float32"))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "int64", "bfloat16"])
def test_other_dtypes(pool: Pool, dtype: str) -> None:
    assert not any(pool.run(compares_with_gloo, 2, dtype))


HOSTS = ["aabb", *(pytest.param(one, marks=pytest.mark.full) for one in ("aabbcc", "aaabbb"))]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("hosts", HOSTS)
def test_over_hosts_collectives_give_what_gloo_gives(pool: Pool, hosts: str) -> None:
    assert not any(pool.run(compares_with_gloo, len(hosts), "float32", hosts))


def adds_by_tree(mesh: Mesh, hosts: str) -> list[object]:
    """Whether all sums of gradients have the bits of the tree, and go as one all-reduce."""
    group, n = formed(mesh, hosts), mesh.num_ranks
    tree = TreeReduce(group, [[Block(2 * rank, 2)] for rank in range(n)])
    same = []
    for length in (1, 5, SLOT + 3, 5 * SLOT):
        rows = [torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(n)]
        expected = fold({Block(r, 1): row.clone() for r, row in enumerate(rows)}, n, torch.add)
        reduction = tree.start([rows[mesh.rank]])
        reduction.fold()
        same.append(torch.equal(reduction.finish(), expected))
    return [all(same), tree.any_order]


@pytest.mark.parametrize(
    ("hosts", "at_once"),
    [
        ("aaa", True),
        ("aabb", True),
        ("aaab", False),
        ("abab", False),
        pytest.param("aabbcc", True, marks=pytest.mark.full),
        pytest.param("aaabbb", False, marks=pytest.mark.full),
    ],
)
def test_exact_sums_have_the_bits_of_the_tree(pool: Pool, hosts: str, at_once: bool) -> None:
    assert pool.run(adds_by_tree, len(hosts), hosts) == [[True, at_once]] * len(hosts)


def sends_around(mesh: Mesh, lengths: list[int], hosts: str = "") -> list[bool]:
    """Every rank sends all of them to the next before it receives one."""
    group, n = formed(mesh, hosts).handle, mesh.num_ranks
    assert group is not None
    left = (mesh.rank - 1) % n
    sent = [group.send([draws(mesh.rank, k)], (mesh.rank + 1) % n, 0) for k in lengths]
    found = [torch.empty(k) for k in lengths]
    works = [group.recv([tensor], left, 0) for tensor in found]
    for work in [*works, *sent]:
        work.wait()
    return [torch.equal(found[i], draws(left, k)) for i, k in enumerate(lengths)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_more_and_larger_messages_than_there_is_room_for(pool: Pool, num_ranks: int) -> None:
    lengths = [0, 1, 10, 70_000, 0, *[5] * 30, 300_000, 2]
    assert all(map(all, pool.run(sends_around, num_ranks, lengths)))


def test_messages_between_hosts_and_inside(pool: Pool) -> None:
    lengths = [0, 1, 10, 70_000, 0, *[5] * 30, 300_000, 2]
    assert all(map(all, pool.run(sends_around, 4, lengths, "aabb")))


def waits_out_of_order(mesh: Mesh, seed: int, hosts: str = "") -> float:
    """Sums and messages under way together, waited for in an order of each rank's own."""
    group, order = formed(mesh, hosts).handle, random.Random(seed * 10 + mesh.rank)
    assert group is not None
    sums = [torch.ones(k) for k in (3, 2 * SLOT, 5, SLOT)]
    arrived = torch.empty(2 * SLOT)
    peer = mesh.num_ranks - 1 - mesh.rank
    works = [group.allreduce([tensor]) for tensor in sums]
    works.append(group.send([torch.full((2 * SLOT,), 7.0)], peer, 0))
    works.append(group.recv([arrived], peer, 0))
    order.shuffle(works)
    for work in works:
        time.sleep(order.random() / 500)
        work.wait()
    return float(sum(t.sum() for t in sums) + arrived.sum())


def test_what_one_waits_for_first_is_its_own_affair(pool: Pool) -> None:
    expected = 2.0 * (3 + 2 * SLOT + 5 + SLOT) + 7.0 * 2 * SLOT
    for seed in range(5):
        assert pool.run(waits_out_of_order, 2, seed) == [expected, expected]
    expected = 4.0 * (3 + 2 * SLOT + 5 + SLOT) + 7.0 * 2 * SLOT
    for seed in range(3):
        assert pool.run(waits_out_of_order, 4, seed, "aabb") == [expected] * 4


def numbers_of_many_turns(mesh: Mesh, num_turns: int) -> list[str]:
    draw, wrong = random.Random(mesh.rank), []
    for turn in range(num_turns):
        if draw.random() < 0.01:
            time.sleep(draw.random() / 200)
        found = mesh.data.all_gather_numbers([mesh.rank + 0.1, turn, -0.0])
        if found != [[rank + 0.1, turn, -0.0] for rank in range(mesh.num_ranks)]:
            wrong.append(f"turn {turn}: {found}")
    return wrong


def test_every_turn_has_its_numbers(pool: Pool) -> None:
    assert not any(pool.run(numbers_of_many_turns, 3, 2_000))


def sums_more_numbers_than_a_slot_holds(mesh: Mesh) -> float:
    return sum(mesh.data.sum_numbers([1.0] * (shared_rounds.MOST_CONTENT // 8 + 1)))


def test_many_numbers(pool: Pool) -> None:
    expected = 2.0 * (shared_rounds.MOST_CONTENT // 8 + 1)
    assert pool.run(sums_more_numbers_than_a_slot_holds, 2) == [expected, expected]


def refused(mesh: Mesh, rank: int, way: str) -> list[object]:
    """Whether ranks share memory if one cannot have it, and a sum by what they have."""
    cannot = mock.patch.object(SharedSegment, way, side_effect=NotShared("not here"))
    with cannot if mesh.rank == rank else nullcontext():
        group = Group(dist.group.WORLD).subgroup(range(mesh.num_ranks))
    ones = torch.ones(3)
    group.all_reduce(ones).wait()
    return [group.shares_memory, ones.tolist()]


@pytest.mark.parametrize(("rank", "way"), [(0, "create"), (1, "open")])
def test_all_share_memory_or_none(pool: Pool, rank: int, way: str) -> None:
    assert pool.run(refused, 2, rank, way) == [[False, [2.0] * 3]] * 2


def does_not_come(mesh: Mesh, hosts: str = "") -> str:
    group = formed(mesh, hosts).handle
    assert isinstance(group, SharedGroup)
    group.timeout_s = 0.5
    if mesh.rank == 1:
        time.sleep(1.5)
        return ""
    try:
        Group(group).all_reduce(torch.ones(3)).wait()
    except GroupLost as lost:
        return str(lost)
    return "no"


def test_who_does_not_come_by_the_deadline_is_named(pool: Pool) -> None:
    told = pool.run(does_not_come, 3)
    assert "rank 1 of the group did not come within 0.5 s" in told[0]
    assert told[2] == told[0]


def test_over_hosts_each_names_the_rank_that_it_waits_for(pool: Pool) -> None:
    """Rank 1 does not come. Rank 3 waits for it, from another host; rank 2 for rank 0."""
    told = pool.run(does_not_come, 4, "aabb")
    for rank, late in ((0, 1), (2, 0), (3, 1)):
        assert f"rank {late} of the group did not come within 0.5 s" in told[rank]


def outlives(mesh: Mesh) -> float:
    """The last rank is done and leaves, before the first sends to the second."""
    group, arrived = formed(mesh).handle, torch.zeros(1)
    assert isinstance(group, SharedGroup)
    if mesh.rank == 2:
        group.shutdown()
    elif mesh.rank == 0:
        time.sleep(3 * shared_group.LOOK_S)
        group.send([torch.ones(1)], 1, 0).wait()
    else:
        group.recv([arrived], 0, 0).wait()
    return float(arrived)


def test_a_message_does_not_need_a_third_rank_that_has_left(pool: Pool) -> None:
    assert pool.run(outlives, 3) == [0.0, 1.0, 0.0]


def is_killed(mesh: Mesh, told: int = 0, hosts: str = "") -> None:
    """The last rank, and rank `told` raises what it hears of it: the pool tells of the first."""
    group = formed(mesh, hosts)
    group.all_reduce(torch.ones(3)).wait()  # so all have formed it
    if mesh.rank == group.num_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.all_reduce(torch.ones(3)).wait()
    except GroupLost as lost:
        if mesh.rank == told:
            words = re.split(": (?:Connection|Read)", str(lost))[0]  # an echo, to the pool
            raise ValueError(f"told: {words}") from None


def test_who_is_gone_is_named(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of the group \(process \d+\) is gone"):
        pool.run(is_killed, 2)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (2, r"rank 3 of the group \(process \d+\) is gone"),
        (1, "no answer from another host, of ranks 1, 3"),
    ],
)
def test_over_hosts_a_dead_rank_is_named_to_its_host_and_its_peers(
    pool: Pool, told: int, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        pool.run(is_killed, 4, told, "aabb")
