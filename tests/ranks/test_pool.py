"""The pool of ranks that the other tests stand on."""

import os
import signal
import time

import pytest
import torch

from shoal.comm.mesh import Mesh
from shoal.testing.ranks import Pool, RankError, importable_name, pack, unpack


def whoami(mesh: Mesh, offset: int) -> list[int]:
    return [mesh.rank + offset, mesh.num_ranks, os.getpid()]


def summed(mesh: Mesh, tensor: torch.Tensor) -> torch.Tensor:
    mesh.data.all_reduce(tensor).wait()
    return tensor


def fails_on_one(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise ValueError("broken on purpose")
    summed(mesh, torch.ones(3))


def dies_on_one(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    summed(mesh, torch.ones(3))


def hangs_on_one(mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(60)
    summed(mesh, torch.ones(3))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_rank_answers_in_its_place(pool: Pool, num_ranks: int) -> None:
    answers = pool.run(whoami, num_ranks, 10)
    assert [answer[:2] for answer in answers] == [[10 + r, num_ranks] for r in range(num_ranks)]
    assert len({answer[2] for answer in answers}) == num_ranks


def test_ranks_are_kept_between_calls(pool: Pool) -> None:
    first, second = (pool.run(whoami, 4, 0) for _ in range(2))
    assert first == second


def test_a_group_works(pool: Pool) -> None:
    for answer in pool.run(summed, 3, torch.arange(4.0)):
        assert torch.equal(answer, 3 * torch.arange(4.0))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails_on_one, "ValueError: broken on purpose"),
        (dies_on_one, "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_told_and_the_pool_recovers(pool: Pool, function, words) -> None:
    with pytest.raises(RankError, match=words):
        pool.run(function, 3)
    assert len(pool.run(whoami, 4, 0)) == 4


def test_a_hang_shows_the_stacks(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"(?s)did not answer.*hangs_on_one"):
        pool.run(hangs_on_one, 2, limit_s=1.0)
    assert len(pool.run(whoami, 4, 0)) == 4


def test_values_survive_the_wire() -> None:
    value = {
        "list": [1, 2.5, None, "text", b"bytes"],
        "tensors": [torch.randn(2, 3), torch.tensor(7), torch.zeros(0, 2), torch.ones(2).half()],
    }
    back = unpack(pack(value))
    assert back["list"] == value["list"]
    for ours, theirs in zip(value["tensors"], back["tensors"], strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be sent"):
        pack(object())
    with pytest.raises(TypeError, match="no importable name"):
        importable_name(lambda mesh: None)
