"""Who owns which elements when state is sharded over the data axis. Pure.

Parameters stand one after another in flat buffers, each from an aligned start, and every buffer is
cut into one shard a rank. A cut falls on a parameter's start or on a multiple of 1,024 elements
from it: so the blocks of the gradient's norm (`numerics/norms.py`) stay whole, and a kernel that
works on several elements at a time meets the same ones as in the whole tensor. Optimizers that
look at more than one element at once get whole tensors.

Rajbhandari et al. 2020, arXiv 1910.02054. Read next: `sync/sharded.py`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from shoal.numerics.norms import BLOCK

ALIGNMENT = 32  # elements: what matrix kernels need to round as they do elsewhere


class Segment(NamedTuple):
    """A run of a parameter's elements, and where it stands in the flat buffer."""

    parameter: int  # its number
    start: int  # in it
    stop: int
    place: int  # in the buffer


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where parameters stand in a flat buffer, and its length at the end."""
    starts = [0]
    for length in lengths:
        starts.append(-(-(starts[-1] + length) // ALIGNMENT) * ALIGNMENT)
    return starts


def shard_evenly(starts: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Where each rank's shard of a buffer begins, and the end; as even as the rule allows."""
    total = starts[-1]
    cuts = [_nearest(total * rank // num_ranks, starts, lengths) for rank in range(num_ranks)]
    return [*cuts, total]


def shard_whole(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Which rank owns each buffer, when none may be cut: largest first, to the least laden."""
    load, owners = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def segments(
    starts: Sequence[int], lengths: Sequence[int], indices: Sequence[int], begin: int, end: int
) -> list[Segment]:
    """The parameters' elements that stand in `begin` to `end` of a buffer."""
    found = []
    for index, place, length in zip(indices, starts, lengths, strict=False):
        first, last = max(begin, place), min(end, place + length)
        if first < last:
            found.append(Segment(index, first - place, last - place, first))
    return found


def _nearest(target: int, starts: Sequence[int], lengths: Sequence[int]) -> int:
    """The place closest to `target` at which a buffer may be cut."""
    at = bisect_right(starts, target, hi=len(lengths)) - 1
    below = starts[at] + min(target - starts[at], lengths[at]) // BLOCK * BLOCK
    above = below + BLOCK if below + BLOCK < starts[at] + lengths[at] else starts[at + 1]
    return below if target - below <= above - target else above
