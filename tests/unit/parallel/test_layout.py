"""Parts of a tensor: those of all ranks together are the whole, each element once."""

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.parallel.boxes import Box, whole_box
from shoal.parallel.layout import (
    Cut,
    LocalLayout,
    Slice,
    blocks_of_rank,
    flat_blocks,
    part_of,
    slices,
    slices_of_run,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut, int]:
    """A shape, a cut that divides it, and the number of ranks."""
    num_ranks, packs = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= num_ranks * packs
    return tuple(shape), Cut(dim, packs), num_ranks


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def covers_once(shape: tuple[int, ...], blocks: list[Box]) -> bool:
    count = torch.zeros(shape, dtype=torch.int64)
    for block in blocks:
        block.of(count).add_(1)
    return bool((count == 1).all())


def holds(whole: Tensor, found: list[Slice]) -> bool:
    """Whether slices have the whole's numbers at the places that they name."""
    return all(
        s.global_shape == whole.shape
        and torch.equal(Box(s.offset, tuple(s.tensor.shape)).of(whole), s.tensor)
        for s in found
    )


@given(cut_shapes())
def test_blocks_of_all_ranks_are_the_whole(case: tuple[tuple[int, ...], Cut, int]) -> None:
    shape, cut, num_ranks = case
    every = [b for rank in range(num_ranks) for b in blocks_of_rank(shape, cut, rank, num_ranks)]
    assert covers_once(shape, every)


@given(cut_shapes())
def test_a_part_is_its_blocks_in_order(case: tuple[tuple[int, ...], Cut, int]) -> None:
    shape, cut, num_ranks = case
    whole = numbered(shape)
    for rank in range(num_ranks):
        blocks = blocks_of_rank(shape, cut, rank, num_ranks)
        part = part_of(whole, cut, rank, num_ranks)
        assert torch.equal(part, torch.cat([block.of(whole) for block in blocks], cut.dim))
        assert part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


@given(SHAPES, st.data())
def test_a_run_is_boxes_with_exactly_its_elements(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = [block.of(numbered(shape)).reshape(-1) for block in flat_blocks(shape, start, stop)]
    numbers = torch.cat(found) if found else torch.zeros(0)
    assert numbers.tolist() == list(range(start, stop)), "each once, and in order"


@st.composite
def row_shards(draw: st.DrawFn, num_rows: int) -> list[tuple[int, int]]:
    """Where each of some ranks' rows begin and end, as ZeRO 3 shares them out."""
    num_shards = draw(st.integers(1, 4))
    rows = -(-num_rows // num_shards)
    starts = [min(rank * rows, num_rows) for rank in range(num_shards)]
    return [(start, min(rows, num_rows - start)) for start in starts]


@given(cut_shapes(), st.data())
def test_what_is_cut_twice_knows_its_place(
    case: tuple[tuple[int, ...], Cut, int], data: st.DataObject
) -> None:
    shape, cut, num_ranks = case
    whole, boxes = numbered(shape), []
    local = part_of(whole, cut, 0, num_ranks).shape
    shards = data.draw(row_shards(local[0]))
    for rank, (start, length) in product(range(num_ranks), shards):
        box = Box((start, *[0] * (len(local) - 1)), (length, *local[1:]))
        values = box.of(part_of(whole, cut, rank, num_ranks))
        holding = LocalLayout({"w": cut}, {"w": shape}, {"w": box}, rank, num_ranks)
        found = slices({"w": values}, holding)["w"]
        assert holds(whole, found)
        boxes += [Box(s.offset, tuple(s.tensor.shape)) for s in found]
    assert covers_once(shape, boxes)


@given(cut_shapes(), st.data())
def test_runs_of_a_cut_parameter_know_their_places(
    case: tuple[tuple[int, ...], Cut, int], data: st.DataObject
) -> None:
    """As ZeRO 1 and 2 cut what the tensor axis left."""
    shape, cut, num_ranks = case
    whole, boxes = numbered(shape), []
    middle = data.draw(st.integers(0, math.prod(shape) // num_ranks))
    for rank in range(num_ranks):
        local = part_of(whole, cut, rank, num_ranks)
        holding = LocalLayout({"w": cut}, {"w": shape}, rank=rank, num_ranks=num_ranks)
        for start, values in ((0, local.view(-1)[:middle]), (middle, local.view(-1)[middle:])):
            found = slices_of_run("w", local.shape, start, values, holding)
            assert holds(whole, found)
            assert sum(s.tensor.numel() for s in found) == values.numel()
            boxes += [Box(s.offset, tuple(s.tensor.shape)) for s in found]
    assert covers_once(shape, boxes)


@given(SHAPES)
def test_what_is_not_cut_is_held_whole(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    ((block, values),) = LocalLayout().blocks("w", whole)
    assert block == whole_box(shape) and values is whole


def test_one_rank_counts_each_parameter() -> None:
    cut = {"cut": Cut(0)}
    first, second = (LocalLayout(cut, rank=rank, num_ranks=2) for rank in range(2))
    assert first.counts("cut") and second.counts("cut"), "each counts its own part"
    assert first.counts("whole") and not second.counts("whole")
    assert not first._replace(elsewhere=frozenset({"cut"})).counts("cut")
