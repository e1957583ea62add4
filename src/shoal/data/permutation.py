"""The global order of samples: a keyed permutation that can be entered anywhere.

The samples of an epoch are visited in an order that is a pure function of seed and epoch. It is
never stored: a small Feistel network on a grid just larger than the data maps a position to a
sample id, and one outside the data is mapped again until it falls inside (cycle walking). So a
resumed run, a new world size or a spare rank asks for step 48,213 and has its ids at once.

Not for data that must be read in sequence (a stream without indexing). All arithmetic is on
explicit 32-bit words, so every platform gives the same bits. Cost: no memory per sample; about
40 ns per id when a few thousand positions are mapped in one call, some 100 us for a lone
batch, so callers map several steps at once (`batches.py`).

Paper: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002. Next: `split.py`.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError, nearest

Ids = NDArray[np.int64]
Keys = Sequence[int | NDArray[np.uint32]]  # of the rounds
End = Literal["drop", "wrap", "pad"]

ENDS: tuple[str, ...] = get_args(End)
"""What happens to the last samples of an epoch that do not fill a batch.

drop: they are left out this epoch. wrap: the batch is filled from the start of the same epoch's
order. pad: the batch stays short; each of its samples counts as much as any other.
"""

_NUM_ROUNDS = 6
_LONG = 0xFFFFFFFFFFFFFFFF


def permute(positions: Ids, num_samples: int, seed: int, epoch: int) -> Ids:
    """The sample ids at `positions` (each in 0 .. num_samples-1) of this epoch's order."""
    assert num_samples > 0 or not positions.size, "no order of nothing"
    return permute_by(positions, num_samples, round_keys(seed, epoch))


def permute_by(positions: Ids, num_samples: int, keys: Keys) -> Ids:
    """The same by keys, each one for all positions or one for each."""
    rows = math.isqrt(max(0, num_samples - 1)) + 1
    columns = -(-num_samples // rows)
    ids = _feistel(positions, rows, columns, keys)
    outside = np.flatnonzero(ids >= num_samples)
    while outside.size:
        theirs = [key if isinstance(key, int) else key[outside] for key in keys]
        walked = _feistel(ids[outside], rows, columns, theirs)
        ids[outside] = walked
        outside = outside[walked >= num_samples]
    return ids


def uniform(positions: Ids, seed: int, epoch: int) -> NDArray[np.float64]:
    """A number from 0 to below 1 for each position: as if drawn, and the same each time."""
    high, low, *_ = round_keys(seed, epoch)
    words = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(high << 32 | low)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    found: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def normalize_weights(weights: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights as shares of their sum, which may be too large for a number."""
    given = np.asarray(weights, dtype=np.float64)
    scaled = given * 2.0**-64 if given.max() > 1e280 else given
    parts: NDArray[np.float64] = scaled / scaled.sum()
    return parts


def check_end(end: str) -> None:
    """Refuse an `end` that is none of `ENDS`."""
    if end not in ENDS:
        raise UsageError(
            f"end={end!r} is not known. It says what happens to the last samples of an epoch that "
            f"do not fill a batch: {', '.join(ENDS)}. {nearest(end, ENDS)}"
        )


def batches_per_epoch(num_samples: int, batch_size: int, end: str) -> int:
    """How many steps one pass over the data takes."""
    if end == "drop":
        return num_samples // batch_size
    return -(-num_samples // batch_size)


def batch_positions(
    first_batch: int, num_batches: int, num_samples: int, batch_size: int, end: str
) -> Ids:
    """The positions of consecutive batches of one epoch, one batch after the other.

    Each has `batch_size` of them, save the last of the epoch under "pad", which may be short.
    """
    positions = np.arange(first_batch * batch_size, (first_batch + num_batches) * batch_size)
    if end == "wrap":
        return positions % num_samples
    return positions[positions < num_samples]


def round_keys(seed: int, epoch: int) -> list[int]:
    """One 32-bit key per round, from SplitMix64 over seed and epoch."""
    state = mix64((seed & _LONG) ^ 0x5348_4F41_4C00_0001)
    state = mix64((state + (epoch & _LONG)) & _LONG)
    return [mix64((state + i * 0x9E3779B97F4A7C15) & _LONG) >> 32 for i in range(_NUM_ROUNDS)]


def mix64(value: int) -> int:
    """SplitMix64's finalizer on a Python integer: every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)


def _feistel(values: Ids, rows: int, columns: int, keys: Keys) -> Ids:
    """A bijection on 0 .. rows*columns-1: rounds move a row by a hash of its column and in turn.

    Each round adds, modulo one half's size, a number that depends on the other half alone, and so
    can be undone. Halves stay below 2**31 and the hash too, so no sum overflows its 32 bits.
    """
    row = values // columns
    moved, other = row.astype(np.uint32), (values - row * columns).astype(np.uint32)
    size, other_size = rows, columns
    for key in keys:
        moved += _mix32(other ^ np.uint32(key)) >> np.uint32(1)
        moved -= moved // np.uint32(size) * np.uint32(size)  # numpy's own remainder is slower
        moved, other, size, other_size = other, moved, other_size, size
    # An even number of rounds: `moved` is the row again.
    return moved.astype(np.int64) * columns + other


def _mix32(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A multiply and xor-shift hash with low bias (Wellons' lowbias32), in place."""
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x7FEB352D)
    words ^= words >> np.uint32(15)
    words *= np.uint32(0x846CA68B)
    words ^= words >> np.uint32(16)
    return words
