"""Boards: everybody's numbers in memory, in every turn those of that turn, and a way out."""

import random
import time
from unittest import mock

import pytest

from shoal.comm import shared_all_gather
from shoal.comm.mesh import Mesh
from shoal.comm.shared_all_gather import open_shared_all_gather
from shoal.comm.shared_memory import NotShared, SharedSegment
from shoal.errors import GroupLost
from shoal.testing.ranks import Pool


def numbers_of(rank: int, turn: int) -> list[float]:
    return [rank + 0.1, float(turn), float("nan") if turn == 3 else -0.0]


def gathered(mesh: Mesh, num_turns: int, is_slow: bool) -> list[str]:
    """What is wrong in some turns, of ranks that are sometimes late."""
    opened = open_shared_all_gather(mesh.data, 3)
    assert opened is not None
    draws, wrong = random.Random(mesh.rank), []
    for turn in range(num_turns):
        if is_slow and draws.random() < 0.1:
            time.sleep(draws.random() * 3 * shared_all_gather.SPIN_S)
        found = [list(row) for row in opened.gather(numbers_of(mesh.rank, turn))]
        expected = [numbers_of(rank, turn) for rank in range(mesh.num_ranks)]
        if repr(found) != repr(expected):
            wrong.append(f"turn {turn}: {found}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_turn_has_its_numbers(pool: Pool, num_ranks: int) -> None:
    assert not any(pool.run(gathered, num_ranks, 3_000, False))


def test_who_is_late_is_waited_for(pool: Pool) -> None:
    assert not any(pool.run(gathered, 2, 200, True))


def left_alone(mesh: Mesh) -> str:
    """What happens to a rank whose peer does not come."""
    mesh.data.is_lost = lambda: True
    opened = open_shared_all_gather(mesh.data, 1)
    assert opened is not None
    if mesh.rank:
        return ""
    try:
        opened.gather([1.0])
    except GroupLost as lost:
        return str(lost)
    return "no"


def test_a_broken_group_is_left(pool: Pool) -> None:
    assert "the generation is over" in pool.run(left_alone, 2)[0]


def refused(mesh: Mesh, rank: int, way: str) -> bool:
    """Whether there is a board if one rank cannot have the memory."""
    error = NotShared("not here")
    if mesh.rank != rank:
        return open_shared_all_gather(mesh.data, 1) is not None
    with mock.patch.object(SharedSegment, way, side_effect=error):
        return open_shared_all_gather(mesh.data, 1) is not None


@pytest.mark.parametrize(("rank", "way"), [(0, "create"), (1, "open")])
def test_all_have_one_or_none(pool: Pool, rank: int, way: str) -> None:
    assert pool.run(refused, 2, rank, way) == [False, False]
