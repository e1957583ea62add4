"""The one order in which the pieces of a global batch are summed.

Floating-point sums depend on their order, so "the same weights at any number of ranks" needs one
order that every split of the work can follow: a binary tree over the piece numbers. A rank adds
up the largest aligned subtrees that lie wholly in its share and sends those; the rank that holds
all of them folds them into the root. Pure; costs log2(pieces) partial sums of memory while pieces
accumulate.

Read next: `buckets.py`, which sends the subtrees.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Block(NamedTuple):
    """An aligned subtree: `num_pieces` is a power of two that divides `first`."""

    first: int
    num_pieces: int


def blocks_of(pieces: range) -> list[Block]:
    """The fewest aligned subtrees that cover a contiguous run of pieces, left to right."""
    blocks = []
    first = pieces.start
    while first < pieces.stop:
        size = 1
        while first % (2 * size) == 0 and first + 2 * size <= pieces.stop:
            size *= 2
        blocks.append(Block(first, size))
        first += size
    return blocks


def fold(parts: Mapping[Block, T], num_pieces: int, add: Callable[[T, T], T]) -> T:
    """The root of the tree over `num_pieces`, from the sums of blocks that cover it once."""
    size = 1
    while size < num_pieces:
        size *= 2
    root = _node(parts, Block(0, size), num_pieces, add)
    assert root is not None
    return root


def _node(
    parts: Mapping[Block, T], block: Block, num_pieces: int, add: Callable[[T, T], T]
) -> T | None:
    # Not a function inside `fold`: one that calls itself would keep the parts alive until the
    # garbage collector comes, and they are as large as the gradients.
    if block in parts:
        return parts[block]
    first, half = block.first, block.num_pieces // 2
    if first >= num_pieces:
        return None
    assert half, f"piece {first} is in no block"
    left = _node(parts, Block(first, half), num_pieces, add)
    right = _node(parts, Block(first + half, half), num_pieces, add)
    if left is None or right is None:
        return left
    return add(left, right)


Values = list[Tensor | None]  # one entry a parameter; None where a piece did not touch it


def add_values(left: Values, right: Values) -> Values:
    """Add into the left entries where both exist; the lists are consumed."""
    sums, terms, result = [], [], []
    for a, b in zip(left, right, strict=True):
        if a is not None and b is not None:
            sums.append(a)
            terms.append(b)
        result.append(b if a is None else a)
    if sums:
        torch._foreach_add_(sums, terms)
    return result


class PieceSum:
    """Adds up one rank's pieces in the tree's order, as they come.

    Call `begin` before the first piece and `push` after each; `rows` then holds the sum of every
    finished block, and `levels` the partial sums of the block that is not finished yet, each to be
    added to what comes next, the last one first.
    """

    def __init__(self, pieces: range):
        self.blocks = blocks_of(pieces)
        self.begin()

    def begin(self) -> None:
        self.rows: list[Values] = []
        self.levels: list[Values] = []
        self._num_pushed = 0  # in the block under way

    def push(self, values: Values) -> None:
        """Take over the values of the next piece."""
        block = self.blocks[len(self.rows)]
        self._num_pushed += 1
        count = self._num_pushed
        while count % 2 == 0:
            values = add_values(self.levels.pop(), values)
            count //= 2
        if self._num_pushed == block.num_pieces:
            self.rows.append(values)
            self._num_pushed = 0
        else:
            self.levels.append(values)


class RunningSum(PieceSum):
    """Adds up one rank's pieces one after another, for sums that are rounded before they are sent:
    they are of one rank, and have no order in common with other numbers of ranks."""

    def __init__(self) -> None:
        super().__init__(range(0))

    def push(self, values: Values) -> None:
        self.levels = [add_values(self.levels[0], values) if self.levels else values]


def total(rows: Sequence[Values], blocks: Sequence[Block], num_pieces: int) -> Values:
    """The sum over all pieces, when one process holds every block."""
    return fold(dict(zip(blocks, rows, strict=True)), num_pieces, add_values)
