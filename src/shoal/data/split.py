"""Who works on which part of a global batch.

A batch is cut into pieces, and a rank's share is a run of neighbouring pieces. Both are pure
functions of counts, so every rank knows every other rank's share without asking, and a change of
the number of ranks moves whole pieces and nothing else.

Not for cutting tensors over a mesh axis; this cuts lists of samples. Cost: none to speak of.
Next: `loader.py`, which loads the pieces.
"""

from itertools import pairwise


def share(rank: int, num_ranks: int, num_pieces: int) -> range:
    """The pieces of a rank: contiguous, in rank order, all of them covered exactly once."""
    return range(rank * num_pieces // num_ranks, (rank + 1) * num_pieces // num_ranks)


def bounds(num_samples: int, num_pieces: int) -> list[tuple[int, int]]:
    """Where each piece of a batch of `num_samples` starts and ends.

    Equal pieces when the batch divides; otherwise as even as possible, larger ones first, so that
    a batch of fewer samples than pieces ends in empty ones.
    """
    size, larger = divmod(num_samples, num_pieces)
    starts = [piece * size + min(piece, larger) for piece in range(num_pieces + 1)]
    return list(pairwise(starts))
