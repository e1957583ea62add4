"""A unit's gradients are packed by whole tensors, however its rows are shared out."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.collectives import Group, Pending
from shoal.comm.compression import CompressedScatter
from shoal.numerics.codecs import make_codec
from shoal.numerics.norms import block_norms, gradient_norm, norm_of_blocks
from shoal.sync.packed_units import PackedUnit, UnitScatter
from shoal.verify.reference_outer import tree_total

SHAPES = [(40, 50), (7,), (3, 1000), (1, 2500), (2000,), (2, 3)]
CODECS = ["int8", "int4", "onebit", "topk:0.05", "bf16"]


class Exchange:
    """Where ranks that are threads leave what they send."""

    def __init__(self, num_ranks: int):
        self.left: dict[tuple[int, int], Tensor] = {}
        self.barrier = threading.Barrier(num_ranks, timeout=20)


class ThreadRank(Group):
    def __init__(self, exchange: Exchange, rank: int, num_ranks: int):
        super().__init__()
        self._exchange, self.rank, self.num_ranks = exchange, rank, num_ranks

    def all_to_all(
        self, out: Tensor, sent: Tensor, out_lengths: Sequence[int], lengths: Sequence[int]
    ) -> Pending:
        parts = sent.split(list(lengths))
        self._exchange.left |= {(self.rank, to): part for to, part in enumerate(parts)}
        self._exchange.barrier.wait()
        for sender, place in enumerate(out.split(list(out_lengths))):
            place.copy_(self._exchange.left[sender, self.rank])
        self._exchange.barrier.wait()
        return Pending()


def rows_of(gradients: Sequence[Tensor], num_ranks: int) -> Tensor:
    """As FSDP2 lays them out: for each rank its rows of each, filled up."""
    parts = []
    for gradient in gradients:
        count = -(-len(gradient) // num_ranks)
        filled = gradient.new_zeros(count * num_ranks, *gradient.shape[1:])
        filled[: len(gradient)] = gradient
        parts.append(filled.view(num_ranks, -1))
    return torch.cat(parts, 1).reshape(-1)


def shard(gradient: Tensor, rank: int, num_ranks: int) -> Tensor:
    count = -(-len(gradient) // num_ranks)
    return gradient[rank * count : (rank + 1) * count].reshape(-1)


def run(num_ranks: int, codec: str, pieces: Sequence[Sequence[Sequence[Tensor]]]) -> list[Any]:
    """By rank, its part of the sum of each parameter, and the norms of the blocks it counts."""
    exchange, found = Exchange(num_ranks), list[Any]([None] * num_ranks)
    made = make_codec(codec)
    assert made is not None

    def work(rank: int) -> None:
        group = ThreadRank(exchange, rank, num_ranks)
        parameters = [(i, shape, 4) for i, shape in enumerate(SHAPES)]
        unit = PackedUnit.of(parameters, codec, num_ranks)
        wanted = unit.wanted(num_ranks)
        scatter = UnitScatter(group, unit, partial(_scatter, group, made, wanted))
        total = None
        for piece in pieces:
            rows = rows_of(piece[rank], num_ranks)
            output = torch.empty(rows.numel() // num_ranks)
            scatter(output, rows)
            total = output if total is None else total + output
        sums, at = [], 0
        for shape in SHAPES:
            width = -(-shape[0] // num_ranks) * torch.Size(shape[1:]).numel()
            own = shard(torch.empty(shape), rank, num_ranks).numel()
            sums.append(total[at : at + own])
            at += width
        counted = [scatter.counted(i, own) for i, own in enumerate(sums)]
        found[rank] = sums, block_norms(c for c in counted if c is not None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert None not in found
    return found


def _scatter(group: Group, codec: Any, wanted: Any, flat: Tensor) -> CompressedScatter:
    return CompressedScatter(group, codec, flat, wanted)


def expected(num_ranks: int, codec: str, pieces: Any) -> list[Tensor]:
    made, unit = (
        make_codec(codec),
        PackedUnit.of([(i, shape, 4) for i, shape in enumerate(SHAPES)], codec, num_ranks),
    )
    packed, found = {t.number for t in unit.packed}, []
    for index, shape in enumerate(SHAPES):
        total: Tensor | None = None
        for piece in pieces:
            terms = [piece[rank][index].reshape(-1) for rank in range(num_ranks)]
            if index in packed:
                assert made is not None
                terms = [made.decode(made.encode(term), term.numel()) for term in terms]
            sum_ = tree_total([term.clone() for term in terms])
            total = sum_ if total is None else total + sum_
        assert total is not None
        found.append(total.view(shape))
    return found


@pytest.mark.parametrize("num_pieces", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("codec", CODECS)
def test_sums_and_norms_are_those_of_whole_tensors(
    codec: str, num_ranks: int, num_pieces: int
) -> None:
    draws = torch.Generator().manual_seed(3)
    pieces = [
        [[torch.randn(shape, generator=draws) for shape in SHAPES] for _ in range(num_ranks)]
        for _ in range(num_pieces)
    ]
    whole, found = expected(num_ranks, codec, pieces), run(num_ranks, codec, pieces)
    for rank, (sums, _) in enumerate(found):
        for sum_, gradient in zip(sums, whole, strict=True):
            assert torch.equal(sum_, shard(gradient, rank, num_ranks))
    norms = torch.cat([norms for _, norms in found])
    assert norm_of_blocks(norms) == gradient_norm(whole)


def test_a_block_on_both_sides_of_a_cut_goes_to_both() -> None:
    unit = PackedUnit.of([(0, (4, 800), 4)], "int8", 2)
    assert unit.wanted(2) == [[range(2048)], [range(1024, 4096)]]
    (tensor,) = unit.packed
    assert [tensor.counted(rank) for rank in (0, 1)] == [range(2048), range(2048, 3200)]
