"""Freed memory goes back to the system, so that what a plan saves is really saved.

glibc keeps freed blocks of up to 32 MB for later, and training frees and asks again in blocks of
other sizes: the gaps between them can be several times the model. A fixed threshold makes it map
every large block apart and give it back at once, for a page fault each time it is asked for again;
so smaller ones are kept, and what every step needs anew is lent instead (`comm/spares.py`).
Elsewhere than under glibc nothing is done.
"""

import ctypes

LARGE = 2 << 20  # bytes; smaller blocks are kept as usual
MOST_KEPT = 32 << 20  # of them, free at the heap's end
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def give_back_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, MOST_KEPT)
