"""What the tensor axis cuts, and what not and why, in rows and in words."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from shoal.formatting import table
from shoal.parallel.tensor.cutting import ParameterCut


class CutRow(msgspec.Struct, frozen=True):
    """Parameters of repeated blocks that are cut alike, or left whole for one reason."""

    names: str
    count: int
    shape: list[int]
    how: str
    why: str


def cuts_in_words(found: Sequence[CutRow], share: float, num_ranks: int) -> str:
    """What the tensor axis cuts, and what not and why."""
    rows = [["parameter", "shape", "cut", "how, or why not"]]
    for row in found:
        shape = " x ".join(map(str, row.shape))
        rows.append([row.names, shape, row.how, row.why])
    return (
        f"Tensors: {share:.1%} of the parameters are cut over {num_ranks} ranks; vectors that are "
        f"not named are whole\n{table(rows, ())}"
    )


def grouped(rows: Sequence[ParameterCut]) -> list[CutRow]:
    """One row for what repeated blocks have alike, in the order of the first of each."""
    families: dict[Any, list[ParameterCut]] = {}
    for row in rows:
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "#", row.name)
        families.setdefault((kind, row.shape, row.how, row.why), []).append(row)
    return [
        CutRow(name, count, list(shape), how, why)
        for (kind, shape, how, why), members in families.items()
        for name, count in _names(kind, [_numbers(row.name) for row in members])
    ]


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _names(kind: str, members: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """`blocks.0..3.weight` for four; what is not a full grid is split by its first number."""
    grid = [sorted(set(column)) for column in zip(*members, strict=True)]
    if math.prod(map(len, grid)) == len(members):
        name = kind
        for numbers in grid:
            name = name.replace("#", _range(numbers), 1)
        yield name, len(members)
        return
    for first, some in groupby(sorted(members), key=lambda numbers: numbers[0]):
        yield from _names(kind.replace("#", str(first), 1), [numbers[1:] for numbers in some])


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    if last - first + 1 == len(numbers):
        return f"{first}..{last}"
    return "{" + ",".join(map(str, numbers)) + "}"
