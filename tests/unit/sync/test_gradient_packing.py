"""What packing did not send, from one number of replicas to another."""

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.layout import WHOLE
from shoal.sync.gradient_packing import GradientPacking, assign_packed
from shoal.sync.state import MemorySource, ShardedState

SHAPES = {"a": (40, 40), "b": (7,), "c": (3000,)}


class Seat:
    """What a packing needs of a group to keep its state."""

    adds_by_tree = False

    def __init__(self, rank: int, num_ranks: int):
        self.rank, self.num_ranks = rank, num_ranks


def seated(rank: int, num_ranks: int, codec: str = "int8") -> GradientPacking:
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
    made = GradientPacking(codec, 100)
    buckets = assign_packed([(tuple(p.shape), 4, p.dtype) for _, p in named], codec)
    made.attach(Seat(rank, num_ranks), named, WHOLE, buckets, {})
    return made


def filled(rank: int, num_ranks: int, codec: str = "int8") -> GradientPacking:
    made, draws = seated(rank, num_ranks, codec), torch.Generator().manual_seed(rank)
    for own in made.buckets.values():
        assert own.kept is not None
        for _, part in own.views(own.kept.residual):
            part.copy_(torch.randn(part.shape, generator=draws))
        for _, _, part in own.owed_runs():
            part.copy_(torch.randn(part.shape, generator=draws))
    made.steps = 7
    return made


def saved(packings: list[GradientPacking]) -> ShardedState:
    """As a checkpoint has it: the parts of all ranks."""
    tensors: dict = {}
    for packing in packings:
        for name, parts in packing.state()[0].items():
            tensors.setdefault(name, []).extend(parts)
    return ShardedState(tensors, packings[0].plain)


def total(packings: list[GradientPacking]) -> dict[str, Tensor]:
    """What all of them have not sent, by parameter, with what the owners of sums have not."""
    sums = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for name, parts in saved(packings).tensors.items():
        own = sums[name.rpartition(".")[2]].view(-1)
        shape = sums[name.rpartition(".")[2]].shape
        whole = torch.zeros(shape).double()
        for part in parts:
            place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape))
            whole[place] += part.tensor
        own += whole.view(-1)
    return sums


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_any_number_of_replicas_shares_what_was_not_sent(after: int) -> None:
    before = [filled(rank, 3) for rank in range(3)]
    state, others = MemorySource(saved(before)), [seated(rank, after) for rank in range(after)]
    for packing in others:
        packing.load(state, 99)
        assert packing.steps == 7
    for name, tensor in total(before).items():
        torch.testing.assert_close(total(others)[name], tensor, rtol=1e-5, atol=1e-5)
    if after == 3:
        for mine, theirs in zip(others, before, strict=True):
            for one, other in zip(mine.buckets.values(), theirs.buckets.values(), strict=True):
                assert torch.equal(one.kept.residual, other.kept.residual)
                assert torch.equal(one.kept.owed, other.kept.owed)


def test_a_state_without_codec_begins_with_nothing() -> None:
    packing = filled(0, 2)
    packing.load(MemorySource(ShardedState({}, {})), 12)
    assert packing.steps == 12 and not any(sum_.any() for sum_ in total([packing]).values())


def test_a_newcomer_has_nothing_that_was_not_sent() -> None:
    leader, newcomer = filled(0, 2), seated(1, 2)
    newcomer.join(MemorySource(ShardedState(leader.shared(), leader.plain)), 7)
    assert newcomer.steps == 7 and not any(sum_.any() for sum_ in total([newcomer]).values())


def test_only_large_tensors_are_in_packed_buckets() -> None:
    buckets = assign_packed([(shape, 4, 0) for shape in SHAPES.values()], "int8")
    assert sorted((b.indices, b.starts) for b in buckets) == [
        ([1], None),
        ([2, 0], [0, 3072, 5120]),
    ]
    assert [b.indices for b in buckets] == [[1], [2, 0]], "in the order in which they fill"
    assert [len(pad) for b in buckets for pad in b.padding] == [72, 448]


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_other_types_are_packed_in_single_precision(
    dtype: torch.dtype, scale: float
) -> None:
    """As factors of a low rank are, and as one process does that plays all replicas."""
    for own in filled(0, 2).buckets.values():
        row = torch.zeros(own.starts[-1], dtype=dtype)
        assert own.prepare(row, scale)[0].dtype == torch.float32
