"""Flat memory that is lent and comes back, so that no step asks the system for it anew.

Large blocks that an allocator gives back and fetches again cost a page fault for every 4 KB; in a
step that is as dear as the sums they are for. What is idle here stays below what was lent at one
time, about twice if sizes differ much.
"""

import torch
from torch import Tensor


class Spares:
    def __init__(self) -> None:
        self._idle: list[torch.UntypedStorage] = []

    def take(self, length: int, like: Tensor) -> Tensor:
        """So many elements of a tensor's type, on its device; what stands in them is left over."""
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
        """Take back what was lent. Nobody may read or write it any more."""
        if tensor.numel():
            self._idle.append(tensor.untyped_storage())
