"""Copies of much memory, past the cache.

A processor reads a line of memory before it writes to it, and keeps what it wrote in its cache, in
the place of something else. Both are in vain where all of the line is written and nobody here reads
it soon: gradients that a server is to read, parameters that will be stepped on later. A copy that
goes past the cache takes half the time and leaves more of the memory's to others.

Neither torch nor numpy has one. The C library has one, for what is larger than most of the cache,
and the caches of today's servers are hundreds of megabytes large. MKL has one, for matrices, and
torch's library for x86 brings it along; where it does not, copies are torch's own. Bits are the
same either way. Not for what is read next, which comes faster out of the cache.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LEAST_BYTES = 1 << 18  # below, what is around a copy takes as long
_WORD_BYTES = 4


def stream(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into places of their shapes, which nobody here reads soon."""
    copy = _matrix_copy()
    small_places, small_values = [], []
    for place, value in zip(places, values, strict=True):
        if copy is not None and _is_plain(place, value):
            length = place.nbytes // _WORD_BYTES
            copy(b"R", b"N", 1, length, 1.0, value.data_ptr(), length, place.data_ptr(), length)
        else:
            small_places.append(place)
            small_values.append(value)
    if small_places:
        torch._foreach_copy_(small_places, small_values)


def _is_plain(place: Tensor, value: Tensor) -> bool:
    """Whether a copy is one of words that stand one after another, and worth the while."""
    return (
        place.nbytes == value.nbytes >= LEAST_BYTES
        and place.nbytes % _WORD_BYTES == 0
        and place.dtype == value.dtype
        and all(t.is_cpu and t.is_contiguous() for t in (place, value))
        and not any(t.is_conj() or t.is_neg() for t in (place, value))  # to be done on reading
    )


@cache
def _matrix_copy() -> Callable[..., None] | None:
    """MKL's `omatcopy` for words of four bytes, which it does not look into if they count once."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        copy = library.MKL_Somatcopy
    except (OSError, AttributeError):  # another build of torch
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    copy.argtypes = [ctypes.c_char, ctypes.c_char, size, size, ctypes.c_float]
    copy.argtypes += [pointer, size, pointer, size]
    copy.restype = None
    found: Callable[..., None] = copy
    return found
