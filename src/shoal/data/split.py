"""Which rank works on which part of a global batch.

A batch is cut into pieces, and a rank's share is a run of neighbouring pieces. Both are pure
functions of counts, so every rank knows every other rank's share without asking, and a change of
the number of ranks moves whole pieces and nothing else.

Not for cutting tensors over a mesh axis; this cuts lists of samples. Cost: none to speak of.
Next: `batches.py`, which loads the pieces.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise


def share(rank: int, num_ranks: int, num_pieces: int) -> range:
    """The pieces of a rank: contiguous, in rank order, all of them covered exactly once."""
    return range(rank * num_pieces // num_ranks, (rank + 1) * num_pieces // num_ranks)


def shares(num_pieces: int, num_ranks: int, counts: Sequence[int] | None = None) -> list[range]:
    """The pieces of every rank: so many as `counts` gives it, or else as even as possible."""
    if counts is None:
        return [share(rank, num_ranks, num_pieces) for rank in range(num_ranks)]
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def apportion_pieces(num_pieces: int, seconds: Sequence[float]) -> list[int]:
    """How many pieces each rank takes so that all are done soonest, none of them without one.

    `seconds` is what a rank takes for a piece. Each further piece goes to the rank that would
    finish it first, which is optimal when pieces are alike.
    """
    counts = [1] * len(seconds)
    due = [(2 * s, rank) for rank, s in enumerate(seconds)]
    heapify(due)
    for _ in range(num_pieces - len(seconds)):
        done, rank = heappop(due)
        counts[rank] += 1
        heappush(due, (done + seconds[rank], rank))
    return counts


def bounds(num_samples: int, num_pieces: int) -> list[tuple[int, int]]:
    """Where each piece of a batch of `num_samples` starts and ends.

    Equal pieces when the batch divides; otherwise as even as possible, larger ones first, so that
    a batch of fewer samples than pieces ends in empty ones.
    """
    size, larger = divmod(num_samples, num_pieces)
    starts = [piece * size + min(piece, larger) for piece in range(num_pieces + 1)]
    return list(pairwise(starts))
