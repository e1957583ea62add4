"""Freed memory goes back to the system, so that what a plan saves is really saved.

glibc keeps freed blocks of up to 32 MB for later, and training frees and asks again in blocks of
other sizes: the gaps between them can be several times the model. A fixed threshold makes it map
every large block apart and give it back at once, for a page fault each time it is asked for again;
so smaller ones are kept, and what every step needs anew is lent instead (`comm/spares.py`).
Elsewhere than under glibc nothing is done.

torch records the last 2,000 messages of a process group, each in a few small blocks that lie where
they were asked for: between activations. What is freed around them cannot be joined, so a forward
that sends (`tensor`) grows by up to a large block for each message until the record is full.

Where large blocks pass through a process now and then, stretches of a table on its way to a
checkpoint say, a fixed threshold would cost every step: what is free is given back in between.
"""

import ctypes
import os

LARGE = 2 << 20  # bytes; smaller blocks are kept as usual
MOST_KEPT = 32 << 20  # of them, free at the heap's end
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def give_back_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, MOST_KEPT)


def trim() -> None:
    """Give back what is free now, also between blocks in use. Costs a walk over what is free."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def record_no_messages() -> None:
    """Before the first group of this process; somebody who asks for a record gets it."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
