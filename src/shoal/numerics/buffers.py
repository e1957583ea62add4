"""Buffers that a forward pass changes, such as BatchNorm's running statistics.

Every piece starts from the step's buffers, and the mean over the pieces that
changed them is committed with the step.
So buffers are the same at any number of ranks, and a step that is given up leaves no trace. A
counter of batches has the same value in every piece, and so has its mean.

Cost: a copy of the changed buffers per piece; nothing for a model without buffers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LARGE = 1 << 16  # elements; a larger buffer is a constant such as a mask unless its version says so


class PieceBuffers:
    """Order of calls: `restore`, forward and backward, `end_piece`, for each piece; then
    `commit` with the mean of what `end_piece` returned, or nothing if the step is given up."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name)
            for module in dict.fromkeys(model.modules())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.hold()

    def hold(self) -> None:
        """Take the present values as the step's: after a commit, or when a state was loaded."""
        self._held = [self._value(i).clone() for i in range(len(self._places))]
        self._versions = [self._mark(i) for i in range(len(self._places))]

    def __len__(self) -> int:
        return len(self._places)

    def restore(self) -> None:
        """Go back to the step's values."""
        for i in range(len(self._places)):
            if self._changed(i):
                self._put(i, self._held[i])

    def end_piece(self) -> list[Tensor | None]:
        """What this piece made of each buffer, in double precision; None where it is as before."""
        return [
            self._value(i).detach().to(torch.float64, copy=True) if self._changed(i) else None
            for i in range(len(self._places))
        ]

    def commit(self, means: list[Tensor | None]) -> None:
        """Make the means the step's buffers. The others go back to what they were."""
        for i, mean in enumerate(means):
            if mean is not None:
                self._held[i] = mean.to(self._held[i].dtype)
            if mean is not None or self._changed(i):
                self._put(i, self._held[i])

    def shapes(self) -> list[torch.Size]:
        return [held.shape for held in self._held]

    def _value(self, i: int) -> Tensor:
        module, name = self._places[i]
        value = module._buffers[name]
        assert value is not None
        return value

    def _changed(self, i: int) -> bool:
        if self._mark(i) != self._versions[i]:
            return True
        # BatchNorm's kernel writes its statistics without raising their version.
        held = self._held[i]
        return held.numel() <= LARGE and not torch.equal(held, self._value(i))

    def _mark(self, i: int) -> tuple[int, int]:
        # A forward may write into a buffer or put another tensor in its place.
        value = self._value(i)
        return id(value), value._version

    def _put(self, i: int, value: Tensor) -> None:
        with torch.no_grad():
            self._value(i).copy_(value)
        self._versions[i] = self._mark(i)


def means_of(totals: list[Tensor | None], counts: Sequence[float]) -> list[Tensor | None]:
    """Turn sums into means over the pieces that changed each buffer."""
    return [
        None if sum_ is None else sum_ / count for sum_, count in zip(totals, counts, strict=True)
    ]
