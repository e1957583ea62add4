"""Named parts of a loss: what a recipe measures beside what it minimises, by name.

A loss may answer with a dict: `"loss"` is minimised, the others are only told of. Each is a mean
over the samples of a piece or a pair (sum, weight); what all ranks hear is the weighted mean over
the pieces of the batch, summed in their order, so it has the same bits at any number of ranks. A
piece may leave a name out.

Cost: 8 bytes for each rank in the message of a step; where a loss has parts, one more message with
some 30 bytes for each part and piece.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.comm.collectives import Group

PartSums = Mapping[str, tuple[float, float]]  # sum and weight


class LossPart(NamedTuple):
    """What a piece says of a part: a mean over `weight`, or the sum."""

    value: float | Tensor
    weight: float | Tensor
    is_mean: bool


class _PieceSum(NamedTuple):
    """A part of one piece, as it is sent."""

    name: str
    piece: int
    sum: float
    weight: float


def pack_parts(by_piece: Mapping[int, Mapping[str, LossPart]], first: int = 0) -> bytes:
    """What a rank tells of its pieces, which count from `first`; nothing if there are no parts."""
    found = []
    for number, parts in by_piece.items():
        for name, part in parts.items():
            weight, value = float(part.weight), float(part.value)
            sum_ = value * weight if part.is_mean else value
            found.append(_PieceSum(name, first + number, sum_, weight))
    return msgspec.msgpack.encode(found) if found else b""


def gather_parts(group: Group, lengths: Sequence[int], own: bytes) -> PartSums:
    """The parts of all, from what each rank packed, of these lengths. Every rank must call it."""
    table = torch.zeros(group.num_ranks, max(lengths), dtype=torch.uint8)
    if own:
        table[group.rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = group.merge(table).cpu().numpy()
    return add_up(row[:length].tobytes() for row, length in zip(rows, lengths) if length)


def gather_all_parts(group: Group, own: bytes) -> PartSums:
    """The same where the lengths are not known. Every rank must call it."""
    lengths = [int(row[0]) for row in group.all_gather_numbers([len(own)])]
    return gather_parts(group, lengths, own) if any(lengths) else {}


def add_up(packed: Iterable[bytes]) -> PartSums:
    """By name, over the pieces in their order. Pure."""
    found = [
        part
        for content in packed
        if content
        for part in msgspec.msgpack.decode(content, type=list[_PieceSum])
    ]
    sums: dict[str, tuple[float, float]] = {}
    for part in sorted(found, key=lambda part: part.piece):
        sum_, weight = sums.get(part.name, (0.0, 0.0))
        sums[part.name] = sum_ + part.sum, weight + part.weight
    return sums


def means(parts: PartSums) -> dict[str, float]:
    """The weighted mean of each part that has a weight."""
    return {name: sum_ / weight for name, (sum_, weight) in parts.items() if weight}
