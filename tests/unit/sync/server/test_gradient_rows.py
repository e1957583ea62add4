"""Rows of gradients: their sums are the tree's, however pieces are dealt; nothing late gets in."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.tree import Block, PieceSum, blocks_of, total
from shoal.sync.server.gradient_rows import GradientRows

LENGTH = 5


@st.composite
def splits(draw: st.DrawFn) -> list[range]:
    """Pieces dealt to workers, neighbours together."""
    num_pieces = draw(st.integers(1, 12))
    cuts = sorted(draw(st.sets(st.integers(1, num_pieces - 1)))) if num_pieces > 1 else []
    ends = [0, *cuts, num_pieces]
    return [range(a, b) for a, b in pairwise(ends)]


def pieces_of(num_pieces: int, seed: int) -> list[Tensor]:
    """Numbers of such different sizes that the order of a sum is seen in its bits."""
    made = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 12, (num_pieces, LENGTH), generator=made)
    return list(torch.randn(num_pieces, LENGTH, generator=made) * 2.0**exponents)


def summed(pieces: list[Tensor], own: range, first: int = 0) -> dict[Block, Tensor]:
    """What a worker pushes; `first` is where its tree begins."""
    adding = PieceSum(range(own.start - first, own.stop - first))
    for piece in own:
        adding.push([pieces[piece].clone()])
    found = {}
    for block, row in zip(adding.blocks, adding.rows, strict=True):
        assert row[0] is not None
        found[Block(block.first + first, block.num_pieces)] = row[0]
    return found


def whole(pieces: list[Tensor]) -> Tensor:
    rows = summed(pieces, range(len(pieces)))
    result = total([[row] for row in rows.values()], list(rows), len(pieces))[0]
    assert result is not None
    return result


@given(splits(), st.integers(0, 999), st.booleans(), st.randoms(), st.data())
def test_sums_are_the_trees_for_any_split(split, seed: int, eager: bool, random, data) -> None:
    num_pieces = split[-1].stop
    pieces = {key: pieces_of(num_pieces, seed + key) for key in (0, 1)}
    rows = GradientRows([0, 1], num_pieces, eager)
    pushes = [(key, own) for key in pieces for own in split]
    random.shuffle(pushes)
    again = data.draw(st.lists(st.sampled_from(pushes), max_size=4))
    sent: list[tuple[Tensor, Tensor]] = []
    for number, (key, own) in enumerate([*pushes, *again]):
        done = {key for key, _ in pushes[: number + 1]}
        found = summed(pieces[key], own)
        sent += [(row, row.clone()) for row in found.values()]
        rows.keep(7, 0, key, found, [True])
        if number + 1 < len(pushes):
            assert set(rows.missing(7, range(num_pieces), 0)) >= {0, 1} - done
    assert not rows.missing(7, range(num_pieces), 0)
    for _ in range(2):  # asked twice: nothing is used up
        sums = rows.sums(7, range(num_pieces))
        assert all(torch.equal(sums[key], whole(pieces[key])) for key in pieces)
    assert all(torch.equal(row, before) for row, before in sent), "rows were changed"


@given(splits(), st.integers(0, 999))
def test_a_workers_own_sum_is_that_of_its_pieces_alone(split, seed: int) -> None:
    num_pieces = split[-1].stop
    pieces = pieces_of(num_pieces, seed)
    rows = GradientRows([0], num_pieces, eager=False)
    for own in split:
        rows.keep(0, 0, 0, summed(pieces, own, own.start), [True])
    for own in split:
        expected = summed(pieces, own, own.start).values()
        found = rows.sums(0, own)[0]
        assert torch.allclose(found, sum(expected, torch.zeros(LENGTH)), rtol=1e-3, atol=1e-3)
        assert not rows.missing(0, own, 0)
        rows.forget(0, own, 0)
        assert rows.missing(0, own, 0) == [0]


def row(value: float) -> Tensor:
    return torch.full((LENGTH,), value)


def test_rows_of_an_attempt_that_was_given_up_are_dropped() -> None:
    rows, left, right = GradientRows([0, 1], 2, True), Block(0, 1), Block(1, 1)
    for key in (0, 1):
        rows.keep(0, 0, key, {left: row(1.0)}, [True, False])
        rows.keep(0, 0, key, {right: row(1.0)}, [False, False])
    assert not rows.missing(0, range(2), 0)
    rows.keep(0, 1, 0, {left: row(2.0)}, [False, True])
    rows.keep(0, 1, 0, {right: row(2.0)}, [False, False])
    rows.keep(0, 0, 1, {left: row(9.0)}, [True, True])  # late
    rows.keep(0, 0, 0, {left: row(9.0)}, [True, True])
    assert rows.missing(0, range(2), 1) == [1] and rows.missing(0, range(2), 0) == [0, 1]
    for block in (left, right):
        rows.keep(0, 1, 1, {block: row(3.0)}, [False, False])
    assert not rows.missing(0, range(2), 1)
    sums = rows.sums(0, range(2))
    assert torch.equal(sums[0], row(4.0)) and torch.equal(sums[1], row(6.0))
    told = rows.touched(0, range(2))
    assert told == {0: [False, True], 1: [False, False]}, "what the first attempt touched counts"


def test_what_others_touched_is_theirs() -> None:
    rows = GradientRows([0], 2, eager=False)
    rows.keep(0, 0, 0, {Block(0, 1): row(1.0)}, [True, False, False])
    rows.keep(0, 0, 0, {Block(1, 1): row(1.0)}, [False, True, False])
    assert rows.touched(0, range(1)) == {0: [True, False, False]}
    assert rows.touched(0, range(1, 2)) == {0: [False, True, False]}
    assert rows.touched(0, range(2)) == {0: [True, True, False]}


def test_a_row_that_comes_again_takes_the_place_of_the_first() -> None:
    rows = GradientRows([0], 4, eager=True)
    rows.keep(0, 0, 0, {Block(0, 2): row(1.0)}, [True])
    rows.keep(0, 0, 0, {Block(2, 2): row(1.0)}, [True])
    rows.keep(0, 0, 0, {Block(0, 2): row(5.0)}, [True])
    assert torch.equal(rows.sums(0, range(4))[0], row(6.0))


def test_batches_that_are_committed_are_forgotten() -> None:
    rows = GradientRows([0], 2, eager=False)
    for batch in range(3):
        rows.keep(batch, 0, 0, {Block(0, 2): row(1.0)}, [True])
    rows.forget(1, range(2), committed=2)
    assert rows.missing(0, range(2), 0) == rows.missing(1, range(2), 0) == [0]
    assert not rows.missing(2, range(2), 0)
    rows.clear()
    assert rows.missing(2, range(2), 0) == [0]


def test_a_server_that_holds_nothing_misses_nothing() -> None:
    rows = GradientRows([], 2, eager=True)
    assert rows.missing(0, range(2), 0) == [] and rows.sums(0, range(2)) == {}
    assert rows.touched(0, range(2)) == {}


def test_blocks_that_do_not_meet_are_missing() -> None:
    rows = GradientRows([0], 8, eager=False)
    blocks = blocks_of(range(8)[:3])  # the last piece of four is not there
    rows.keep(0, 0, 0, {block: row(1.0) for block in blocks}, [True])
    rows.keep(0, 0, 0, {Block(4, 4): row(1.0)}, [True])
    assert rows.missing(0, range(8), 0) == [0] and not rows.missing(0, range(3), 0)


@pytest.mark.parametrize("eager", [True, False])
def test_a_batch_that_is_tried_often_takes_no_more_memory(eager: bool) -> None:
    """An attempt may be given up, as after an overflow, and rows may come twice."""
    split, lent = [range(2), range(2, 4)], list[int]()
    rows = GradientRows([0, 1], 4, eager)
    spares = rows._spares
    for batch in range(3):
        for attempt in range(5):
            for key, own in [(key, own) for key in (0, 1) for own in split * 2]:
                pieces = pieces_of(4, attempt)
                rows.keep(batch, attempt, key, summed(pieces, own), [True])
            assert torch.equal(rows.sums(batch, range(4))[0], whole(pieces_of(4, attempt)))
        rows.forget(batch, range(4), batch + 1)
        lent.append(len(spares._idle))
    assert lent == [2, 2, 2]
