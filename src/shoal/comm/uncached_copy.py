"""Large copies that bypass the cache (non-temporal stores).

A processor reads a cache line before it writes to it, and keeps what it wrote in its cache, where
it evicts something else. Neither helps where whole lines are written and there are more than the
cache holds: gradients that a server is to read, parameters that will be stepped on later. A copy
that bypasses the cache takes half the time and leaves more memory bandwidth to others.

Torch has none. The C library has one for what is larger than most of the cache, and the caches of
today's servers are hundreds of megabytes large. MKL has one for matrices, if the processor has
AVX-512, and torch's library for x86 includes it; elsewhere the C library decides. The copy is exact
either way. Not for tensors that fit the cache and are read next.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Of one copy. With 1 MB a copy and a step on it took a third longer, up to 4 MB it made no
# difference, with 10 it was a fifth faster.
LEAST_BYTES = 8 << 20
_WORD_BYTES = 4


def copy_uncached(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into places of their shapes; large ones bypass the cache."""
    other_places, other_values = [], []
    for place, value in zip(places, values, strict=True):
        if _is_plain(place, value):
            _copy_words(place, value)
        else:
            other_places.append(place)
            other_values.append(value)
    if other_places:
        torch._foreach_copy_(other_places, other_values)


def _is_plain(place: Tensor, value: Tensor) -> bool:
    """Whether a copy is one of contiguous words, and large enough to be worth it."""
    return (
        place.nbytes == value.nbytes >= LEAST_BYTES
        and place.nbytes % _WORD_BYTES == 0
        and place.dtype == value.dtype
        and all(t.is_cpu and t.is_contiguous() for t in (place, value))
        # Else there is something to be done on reading, or nothing to be read.
        and not any(t.is_conj() or t.is_neg() or t._is_zerotensor() for t in (place, value))
    )


def _copy_words(place: Tensor, value: Tensor) -> None:
    copy = _matrix_copy()
    if copy is None:
        np.copyto(_bytes_of(place), _bytes_of(value))
    else:
        length = place.nbytes // _WORD_BYTES
        copy(b"R", b"N", 1, length, 1.0, value.data_ptr(), length, place.data_ptr(), length)


def _bytes_of(tensor: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return tensor.detach().view(-1).view(torch.uint8).numpy()


@cache
def _matrix_copy() -> Callable[..., None] | None:
    """MKL's `omatcopy` for words of four bytes; with a factor of 1 it does not look into them."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
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
