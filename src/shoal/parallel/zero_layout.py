"""Which rank owns which elements when state is sharded over the data axis (ZeRO 1 and 2). Pure.

Parameters stand one after another in flat buffers, each from an aligned start, and every buffer is
cut into one shard a rank (`lay_out_buffers`). A cut falls on a parameter's start or on a multiple
of 1,024 elements from it: so the blocks of the gradient's norm (`numerics/norms.py`) stay whole,
and a kernel that works on several elements at a time meets the same ones as in the whole tensor.
Optimizers that look at more than one element at once get whole tensors.

Rajbhandari et al. 2020, arXiv 1910.02054. Read next: `sync/zero.py`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal.comm.buckets import BUCKET_BYTES, assign_apart
from shoal.numerics.norms import BLOCK

ALIGNMENT = 32  # elements: what matrix kernels need to round as they do elsewhere


class FlatSegment(NamedTuple):
    """A range of a parameter's elements, and its offset in the flat buffer."""

    parameter: int  # its number
    start: int  # in it
    stop: int
    place: int  # in the buffer

    @property
    def length(self) -> int:
        return self.stop - self.start


class FlatBuffer(NamedTuple):
    """Some parameters in one flat buffer, which is cut into a shard for each rank."""

    indices: list[int]  # of the parameters
    lengths: list[int]
    starts: list[int]  # of each in the buffer, and its end
    cuts: list[int]  # where each rank's shard begins, and the end
    is_packed: bool = False  # whether its gradients are packed

    @property
    def shards(self) -> list[int]:
        """The elements of each rank's shard."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    def segments(self, rank: int) -> list[FlatSegment]:
        """The parameters' elements that stand in a rank's shard."""
        found = []
        for index, place, length in zip(self.indices, self.starts, self.lengths, strict=False):
            first = max(self.cuts[rank], place)
            last = min(self.cuts[rank + 1], place + length)
            if first < last:
                found.append(FlatSegment(index, first - place, last - place, first))
        return found


def lay_out_buffers(
    sizes: Sequence[tuple[int, int, object]],
    num_ranks: int,
    may_cut: bool,
    packed: Sequence[bool] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> list[FlatBuffer]:
    """Assign parameters, given as (elements, bytes of one, kind), to flat buffers, one kind in
    each. Those whose gradients are `packed` have buffers of their own, and stand there from whole
    blocks on.

    If a parameter may not be cut, each buffer goes to one rank, and there are enough to be fair.
    """
    num_bytes = [length * itemsize for length, itemsize, _ in sizes]
    fair = bucket_bytes if may_cut else max(1, sum(num_bytes) // (8 * num_ranks))
    kinds = [kind for _, _, kind in sizes]
    lanes = packed or [False] * len(sizes)
    assigned = assign_apart(
        list(zip(num_bytes, kinds, strict=True)), lanes, min(bucket_bytes, fair)
    )
    made = []
    for indices in assigned:
        lengths, is_packed = [sizes[i][0] for i in indices], lanes[indices[0]]
        starts = starts_of(lengths, BLOCK if is_packed else ALIGNMENT)
        cuts = shard_evenly(starts, lengths, num_ranks)
        made.append(FlatBuffer(indices, lengths, starts, cuts, is_packed))
    if may_cut:
        return made
    owners = shard_whole([buffer.starts[-1] for buffer in made], num_ranks)
    return [
        buffer._replace(cuts=[0 if r <= owner else buffer.starts[-1] for r in range(num_ranks + 1)])
        for buffer, owner in zip(made, owners, strict=True)
    ]


def starts_of(lengths: Sequence[int], alignment: int = ALIGNMENT) -> list[int]:
    """Where parameters stand in a flat buffer, and its length at the end."""
    starts = [0]
    for length in lengths:
        starts.append(-(-(starts[-1] + length) // alignment) * alignment)
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


def _nearest(target: int, starts: Sequence[int], lengths: Sequence[int]) -> int:
    """The place closest to `target` at which a buffer may be cut."""
    at = bisect_right(starts, target, hi=len(lengths)) - 1
    below = starts[at] + min(target - starts[at], lengths[at]) // BLOCK * BLOCK
    above = below + BLOCK if below + BLOCK < starts[at] + lengths[at] else starts[at + 1]
    return below if target - below <= above - target else above
