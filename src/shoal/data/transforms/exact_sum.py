"""Exact sums of floating-point numbers: the same bits in any order and any division of the work.

Each number is cut at fixed places, every 40 binary digits, into whole multiples of powers of two;
the multiples are added as integers, which loses nothing. Two sums merge by adding integers. Only
the final answer is rounded, once. The same idea, with bounded memory, is in the paper.

Not for gradients, which have a tree of their own. Cost: some 5 passes over the numbers; an integer
for each column and each of the two or three places that occur in practice.

Paper: Demmel and Nguyen, "Parallel reproducible summation", 2015. Next: `statistics.py`.
"""

import math
from fractions import Fraction
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import RecipeError

Floats: TypeAlias = NDArray[np.float64]

_WIDTH = 40  # binary digits a place; 2**22 multiples below 2**40 stay within 63 bits
_MOST_ROWS = 1 << 22
_LARGEST = 2.0**480  # so that a square and its parts are finite
_SPLITTER = 2.0**27 + 1


class ExactSum:
    """The sum of rows of numbers, column by column."""

    def __init__(self, num_columns: int):
        self.num_columns = num_columns
        self._places: dict[int, list[int]] = {}  # place -> a sum of multiples of 2**(40 * place)

    def add(self, rows: Floats) -> None:
        """Add finite numbers, [any number, num_columns]."""
        for start in range(0, len(rows), _MOST_ROWS):
            self._add(rows[start : start + _MOST_ROWS].copy())

    def _add(self, left: Floats) -> None:
        largest = float(np.abs(left).max(initial=0.0))
        place = (math.frexp(largest)[1] - 1) // _WIDTH
        while left.any():
            multiples = np.trunc(np.ldexp(left, -_WIDTH * place))
            left -= np.ldexp(multiples, _WIDTH * place)  # exact: these digits are cut off
            sums = multiples.astype(np.int64).sum(axis=0)
            self._add_at(place, [int(part) for part in sums])
            place -= 1

    def _add_at(self, place: int, sums: list[int]) -> None:
        if any(sums):
            before = self._places.get(place, [0] * self.num_columns)
            self._places[place] = [a + b for a, b in zip(before, sums, strict=True)]

    def merge(self, other: Self) -> None:
        """Add another sum of as many columns."""
        for place, sums in other._places.items():
            self._add_at(place, sums)

    def totals(self) -> list[Fraction]:
        """The sum of each column, exactly."""
        found = [Fraction(0)] * self.num_columns
        for place, sums in self._places.items():
            unit = Fraction(2) ** (_WIDTH * place)
            found = [total + unit * part for total, part in zip(found, sums, strict=True)]
        return found

    def packed(self) -> dict[str, Any]:
        """Itself as plain values; integers are text, because they have no limit."""
        places = [[place, *map(str, sums)] for place, sums in sorted(self._places.items())]
        return {"num_columns": self.num_columns, "places": places}

    @classmethod
    def of(cls, packed: dict[str, Any]) -> Self:
        """What was packed."""
        made = cls(packed["num_columns"])
        for place, *sums in packed["places"]:
            made._add_at(place, [int(part) for part in sums])
        return made


def squares(numbers: Floats) -> tuple[Floats, Floats]:
    """The squares of numbers in two parts, whose sum is exact (down to 2**-1000).

    A square has twice as many digits as fit; the second part is what the first one lost.
    """
    if np.abs(numbers).max(initial=0.0) > _LARGEST:
        raise RecipeError(f"a number is larger than {_LARGEST:.0e}, and its square has no place")
    product = numbers * numbers
    spread = _SPLITTER * numbers
    high = spread - (spread - numbers)
    low = numbers - high
    lost = ((high * high - product) + 2.0 * high * low) + low * low
    return product, lost
