"""A number for a set of samples, by which two sets can be told apart.

What a rank really loaded is marked, and the marks of all are added up to that of the step
(`ledger.py`); none depends on an order, so neither do their sums. Samples of several steps that are
gathered at once are marked at once, since a call of numpy costs more than 32 numbers do. Next:
`ledger.py`.
"""

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import Ids

MODULUS = 2**53  # so that a mark is exact as a double
_SALT = np.uint64(0x5348_4F41_4C4C_4547)


def mark(ids: Ids) -> int:
    """A number for these samples in any order. Marks of parts add up to that of the whole."""
    return int(_words(ids).sum(dtype=np.uint64)) % MODULUS


def marks_of_rows(ids: Ids) -> list[int]:
    """The mark of each row."""
    sums: list[int] = _words(ids).sum(axis=1, dtype=np.uint64).tolist()
    return [of_row % MODULUS for of_row in sums]


def _words(ids: Ids) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = ids.astype(np.uint64) ^ _SALT
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(32)
    return words
