"""Boxes: whatever is cut covers the whole exactly once, and whatever does not is seen."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.chunks import MIN_SPLIT_BYTES, TensorRegion, assign_writers
from shoal.parallel.boxes import Box, split_box, tile, whole_box

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def painted(boxes: list[Box], whole: tuple[int, ...]) -> torch.Tensor:
    """How often each element is covered: the plain way to know."""
    count = torch.zeros(whole, dtype=torch.int64)
    for box in boxes:
        box.of(count).add_(1)
    return count


@st.composite
def boxes_in(draw: st.DrawFn, whole: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, size - 1)) for size in whole)
    shape = tuple(draw(st.integers(1, size - at)) for size, at in zip(whole, offset))
    return Box(offset, shape)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[Box], tuple[int, ...]]:
    """A whole cut again and again at random."""
    whole = draw(shapes)
    boxes = [whole_box(whole)]
    for _ in range(draw(st.integers(0, 12))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[dim] - 1))
        boxes += [box.cut(dim, 0, at), box.cut(dim, at, box.shape[dim])]
    return draw(st.permutations(boxes)), whole


@given(tilings())
def test_what_was_cut_tiles(case: tuple[list[Box], tuple[int, ...]]) -> None:
    boxes, whole = case
    assert tile(boxes, whole)
    if len(boxes) > 1:
        assert not tile(boxes[1:], whole)
    assert not tile([*boxes, boxes[0]], whole)


@given(st.data())
def test_tiling_is_what_painting_says(data: st.DataObject) -> None:
    whole = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(whole), max_size=5))
    assert tile(boxes, whole) == bool((painted(boxes, whole) == 1).all())


@given(st.data())
def test_what_two_boxes_share(data: st.DataObject) -> None:
    whole = data.draw(shapes)
    a, b = data.draw(boxes_in(whole)), data.draw(boxes_in(whole))
    both = painted([a, b], whole) == 2
    common = a.intersect(b)
    assert (common is None) == (not both.any())
    if common is not None:
        assert common.of(both).all() and int(both.sum()) == common.numel
        values = torch.arange(math.prod(whole)).view(whole)
        assert torch.equal(
            common.relative_to(a).of(a.of(values)), common.relative_to(b).of(b.of(values))
        )


@given(shapes, st.integers(1, 40))
def test_pieces_tile_and_keep_the_order(whole: tuple[int, ...], most: int) -> None:
    values = torch.arange(math.prod(whole)).view(whole)
    parts = list(split_box(whole_box(whole), most))
    assert tile(parts, whole)
    assert all(part.numel <= most for part in parts)
    flat = torch.cat([part.of(values).reshape(-1) for part in parts])
    assert torch.equal(flat, values.reshape(-1))


def test_boxes_outside_or_of_another_rank_do_not_fit() -> None:
    assert Box((1, 0), (1, 2)).fits((2, 2))
    for wrong in (Box((2, 0), (1, 1)), Box((-1, 0), (1, 1)), Box((0,), (1,)), Box((0, 0), (0, 1))):
        assert not wrong.fits((2, 2))


@given(st.data())
def test_each_byte_is_dealt_to_one_of_its_holders(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    held: list[list[TensorRegion]] = [[] for _ in range(num_ranks)]
    wholes: dict[str, tuple[int, ...]] = {}
    for number in range(data.draw(st.integers(0, 6))):
        boxes, whole = data.draw(tilings())
        scale = data.draw(st.sampled_from([1, MIN_SPLIT_BYTES]))  # some are worth cutting
        whole = (*whole, scale)
        wholes[f"t{number}"] = whole
        for box in boxes:
            box = Box((*box.offset, 0), (*box.shape, scale))
            ranks = data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
            for rank in ranks:
                held[rank].append(TensorRegion(f"t{number}", "F32", whole, box))
    shares = assign_writers(held)
    for rank, share in enumerate(shares):
        for item in share:
            assert any(
                own.name == item.name and own.box.intersect(item.box) == item.box
                for own in held[rank]
            )
    for name, whole in wholes.items():
        assert tile([item.box for share in shares for item in share if item.name == name], whole)


def test_what_all_hold_is_shared_out_evenly() -> None:
    items = [
        TensorRegion(f"t{i}", "F32", (s, 64), whole_box((s, 64)))
        for i, s in enumerate((4096, 3, 9))
    ]
    shares = assign_writers([items] * 4)
    loads = [sum(item.box.numel for item in share) for share in shares]
    assert max(loads) - min(loads) <= 12 * 64
