"""Returns freed memory to the system, so that what a plan saves is really saved.

glibc keeps freed blocks of up to 32 MB, and training frees and allocates blocks of other sizes: the
gaps between them can be several times the model. A fixed threshold makes glibc map every large
block apart and return it at once, for a page fault at each new allocation; smaller blocks are kept,
and buffers that every step needs come from a pool (`comm/buffer_pool.py`). Without glibc nothing is
done.

torch's flight recorder keeps the last 2,000 messages of a process group, each in a few small blocks
between activations. Memory freed around them cannot be joined, so a forward that sends (`tensor`)
grows by up to a large block for each message until the record is full.

Where large blocks pass through a process now and then, chunks of a table on its way to a checkpoint
say, a fixed threshold would cost every step: free memory is given back in between (`trim`).
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

LARGE = 2 << 20  # bytes; smaller blocks are kept as usual
MOST_KEPT = 32 << 20  # of them, free at the heap's end
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def give_back_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, MOST_KEPT)


def trim() -> None:
    """Give back memory that is free now, also between blocks in use. Costs a walk over it."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def disable_flight_recorder() -> None:
    """Call it before the first group of this process; a user's own setting is kept."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


@contextmanager
def loaded_is_frozen() -> Iterator[None]:
    """What there is already is out of the garbage collector's sight, which would walk over all of
    it again and again."""
    was_frozen = gc.get_freeze_count() > 0
    if not was_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
