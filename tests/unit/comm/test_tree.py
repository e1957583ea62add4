"""The canonical tree: any split of the pieces gives the same sum, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.tree import Block, PieceSum, add_values, blocks_of, fold, total
from shoal.data.split import share


def shares(num_pieces: int, num_ranks: int) -> list[range]:
    return [share(rank, num_ranks, num_pieces) for rank in range(num_ranks)]


@given(st.integers(0, 70), st.integers(0, 70))
def test_blocks_cover_the_pieces_once_and_are_aligned(first: int, length: int) -> None:
    blocks = blocks_of(range(first, first + length))
    covered = [p for b in blocks for p in range(b.first, b.first + b.num_pieces)]
    assert covered == list(range(first, first + length))
    for block in blocks:
        assert block.num_pieces & (block.num_pieces - 1) == 0
        assert block.first % block.num_pieces == 0


@pytest.mark.parametrize(
    ("pieces", "blocks"),
    [
        (range(4), [Block(0, 4)]),
        (range(1, 4), [Block(1, 1), Block(2, 2)]),
        (range(6), [Block(0, 4), Block(4, 2)]),
        (range(3, 3), []),
    ],
)
def test_blocks_are_the_fewest(pieces: range, blocks: list[Block]) -> None:
    assert blocks_of(pieces) == blocks


@given(st.integers(1, 33), st.integers(1, 8))
def test_the_order_of_additions_does_not_depend_on_the_split(num_pieces, num_ranks) -> None:
    """Additions written down as text: the same brackets, however the pieces were dealt."""

    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    whole = fold({Block(i, 1): str(i) for i in range(num_pieces)}, num_pieces, add)
    parts = {}
    for pieces in shares(num_pieces, num_ranks):
        for block in blocks_of(pieces):
            leaves = {Block(i, 1): str(block.first + i) for i in range(block.num_pieces)}
            parts[block] = fold(leaves, block.num_pieces, add)
    assert fold(parts, num_pieces, add) == whole


@given(st.integers(1, 17), st.integers(1, 5), st.integers(0, 1000))
def test_sums_have_the_same_bits_at_any_split(num_pieces, num_ranks, seed) -> None:
    draws = torch.Generator().manual_seed(seed)
    values = [torch.randn(3, generator=draws) * 10 ** (i % 5) for i in range(num_pieces)]

    def of(num_ranks: int) -> torch.Tensor:
        parts = {}
        for pieces in shares(num_pieces, num_ranks):
            sum_ = PieceSum(pieces)
            for i in pieces:
                sum_.push([values[i].clone()])
            parts |= dict(zip(sum_.blocks, sum_.rows, strict=True))
        (root,) = fold(parts, num_pieces, add_values)
        assert root is not None
        return root

    assert torch.equal(of(num_ranks), of(1))
    torch.testing.assert_close(of(1), torch.stack(values).sum(0), rtol=1e-4, atol=1e-2)


def test_what_a_piece_did_not_touch_is_none_until_one_does() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert add_values([None, None, one], [None, two, two])[0] is None
    _, second, third = add_values([None, None, torch.ones(2)], [None, two, two])
    assert torch.equal(second, two) and torch.equal(third, torch.full((2,), 3.0))


def test_begin_forgets_a_step_that_was_given_up() -> None:
    sum_ = PieceSum(range(4))
    for value in (1.0, 2.0, 3.0):
        sum_.push([torch.tensor(value)])
    sum_.begin()
    for value in (1.0, 2.0, 3.0, 4.0):
        sum_.push([torch.tensor(value)])
    assert total(sum_.rows, sum_.blocks, 4) == [torch.tensor(10.0)]
