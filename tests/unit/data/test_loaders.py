"""Processes that load ahead: the same pieces, whatever becomes of the processes."""

import os
import signal
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from shoal.data.loader import Batches
from shoal.data.loaders import Key, Turns
from shoal.data.sources import Pass
from shoal.errors import RecipeError
from shoal.testing.leaks import descendants, wait_until


class Slow:
    """Samples of many kinds; one of them may kill the process that loads it."""

    def __init__(self, deadly: int = -1, broken: int = -1):
        self.deadly, self.broken, self.rank = deadly, broken, os.getpid()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int):
        if index == self.deadly and os.getpid() != self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.broken:
            raise ValueError(f"no good: {index}")
        return {"x": torch.full((5,), float(index)), "n": np.int64(index)}, index

    def vary(self, index: int, of: Pass):
        inputs, target = self[index]
        return inputs, target + 1000 * of.epoch


@pytest.fixture
def make() -> Iterator:
    made, others = [], descendants(os.getpid())

    def make(source, loaders: int = 2, **kwargs) -> Batches:
        made.append(Batches(source, batch_size=16, num_pieces=4, seed=3, loaders=loaders, **kwargs))
        return made[-1]

    yield make
    for batches in made:
        batches.close()
    assert wait_until(lambda: not descendants(os.getpid()) - others, 5)


def walk(batches: Batches, steps, pieces=(1, 2)):
    for step in steps:
        for piece in pieces:
            yield batches.at(step).piece(piece)


def same(one, two) -> bool:
    alike = torch.equal(one.inputs["x"], two.inputs["x"]) and torch.equal(one.target, two.target)
    return alike and one.ids.tolist() == two.ids.tolist() and one.num_samples == two.num_samples


def test_pieces_are_those_that_a_rank_would_load(make) -> None:
    for steps, pieces in ((range(14), (1, 2)), (range(5, 9), (0,)), ([3, 4, 4, 5, 0], (2, 3))):
        ahead, here = walk(make(Slow()), steps, pieces), walk(make(Slow(), 0), steps, pieces)
        assert all(same(a, b) for a, b in zip(ahead, here, strict=True))


def test_other_pieces_after_work_has_moved(make) -> None:
    ahead, here = make(Slow()), make(Slow(), 0)
    for pieces in ((0, 1), (0,), (0, 1, 2), (3,)):
        for a, b in zip(walk(ahead, range(3), pieces), walk(here, range(3), pieces), strict=True):
            assert same(a, b)


def test_pieces_that_are_kept_are_not_written_over(make) -> None:
    batches = make(Slow())
    kept = list(islice(walk(batches, range(40)), 60))
    here = list(islice(walk(make(Slow(), 0), range(40)), 60))
    assert all(same(a, b) for a, b in zip(kept, here, strict=True))


def test_a_loader_that_is_killed_is_replaced(make) -> None:
    others = descendants(os.getpid())
    batches, here = make(Slow()), make(Slow(), 0)
    for step in range(12):
        for pid in descendants(os.getpid()) - others:
            os.kill(pid, signal.SIGKILL)
        assert same(batches.at(step).piece(1), here.at(step).piece(1))


def test_a_sample_that_kills_is_named(make) -> None:
    source = Slow()
    source.deadly = int(make(source, 0).at(2).ids_of(0)[1])
    batches = make(source, 1)
    list(walk(batches, range(2), (0,)))
    with pytest.raises(RecipeError, match=rf"{source.deadly}.*died 3 times.*signal 9"):
        list(walk(batches, [2], (0,)))


def test_a_sample_that_raises_is_named(make) -> None:
    batches = make(Slow(broken=7))
    with pytest.raises(RecipeError, match=r"sample 7 of 96 failed: ValueError: no good: 7"):
        list(walk(batches, range(6), (0, 1, 2, 3)))


def test_turns() -> None:
    turns = Turns()
    assert list(islice(turns.after(Key(4, 2)), 2)) == [Key(4, 2), Key(5, 2)]
    assert next(iter(turns.after(Key(4, 3)))) == Key(4, 3)
    told = [Key(5, 2), Key(5, 3), Key(6, 2), Key(6, 3)]
    assert list(islice(turns.after(Key(5, 2)), 4)) == told
    assert list(islice(turns.after(Key(5, 3)), 3)) == told[1:]
