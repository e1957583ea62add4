"""A pool of flat buffers that are used again, so that no step allocates large blocks.

A block that the allocator returns to the system and fetches again costs a page fault for every 4
KB; in a step that takes as long as the sums which need the block. Cost: idle buffers take at most
as much memory as was in use at one time, about twice that if sizes differ much.
"""

import torch
from torch import Tensor


class BufferPool:
    def __init__(self) -> None:
        self._idle: list[torch.UntypedStorage] = []

    def take(self, length: int, like: Tensor) -> Tensor:
        """A buffer of `length` elements, with the dtype and device of `like`; not initialized."""
        num_bytes = length * like.element_size()
        fits = [
            storage
            for storage in self._idle
            if num_bytes <= storage.nbytes() <= 2 * num_bytes and storage.device == like.device
        ]
        if not fits:
            return torch.empty(length, dtype=like.dtype, device=like.device)
        best = min(fits, key=lambda storage: storage.nbytes())
        self._idle.remove(best)
        return like.new_empty(0).set_(best, 0, (length,), (1,))

    def give(self, tensor: Tensor) -> None:
        """Return a buffer to the pool. The caller must not use it any more."""
        if tensor.numel():
            self._idle.append(tensor.untyped_storage())
