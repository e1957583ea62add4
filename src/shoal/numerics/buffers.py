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
from torch.nn.modules.batchnorm import _NormBase

from shoal.errors import RecipeError

LARGE = 1 << 16  # elements; a larger buffer is a constant such as a mask unless its version says so


class PieceBuffers:
    """Order of calls: `restore`, forward and backward, `end_piece`, for each piece; then
    `commit` with the mean of what `end_piece` returned, or nothing if the step is given up."""

    def __init__(self, model: nn.Module):
        self.places = [
            (module, name)
            for module in dict.fromkeys(model.modules())
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.hold()

    def hold(self) -> None:
        """Take the present values as the step's: after a commit, or when a state was loaded."""
        self._held = [self._value(i).clone() for i in range(len(self.places))]
        self._versions = [self._mark(i) for i in range(len(self.places))]

    def __len__(self) -> int:
        return len(self.places)

    def restore(self) -> None:
        """Go back to the step's values."""
        for i in range(len(self.places)):
            if self._changed(i):
                self._put(i, self._held[i])

    def end_piece(self) -> list[Tensor | None]:
        """What this piece made of each buffer, in double precision; None where it is as before."""
        return [self._result(i) if self._changed(i) else None for i in range(len(self.places))]

    def changed(self) -> list[tuple[nn.Module, str]]:
        """The modules and names of the buffers that are not as they were held."""
        return [place for i, place in enumerate(self.places) if self._changed(i)]

    def commit(self, means: list[Tensor | None]) -> None:
        """Make the means the step's buffers. The others go back to what they were."""
        for i, mean in enumerate(means):
            if mean is not None:
                held = self._held[i]
                value = torch.view_as_complex(mean) if held.is_complex() else mean
                self._held[i] = value.to(held.dtype)
            if mean is not None or self._changed(i):
                self._put(i, self._held[i])

    def values(self, at_rest: bool) -> list[Tensor]:
        """The step's values of each buffer, where they stand.

        While a step is computed those of small ones are what is held. At rest they are the buffers
        themselves, except one that was written to since, which the next piece restores.
        """
        return [
            self._value(i) if self._is_unwritten(i, at_rest) else held
            for i, held in enumerate(self._held)
        ]

    def _is_unwritten(self, i: int, at_rest: bool) -> bool:
        may_be_read = at_rest or self._held[i].numel() > LARGE
        return may_be_read and self._mark(i) == self._versions[i]

    def shapes(self) -> list[torch.Size]:
        """Of what `end_piece` returns."""
        return [_as_real(held).shape for held in self._held]

    def _result(self, i: int) -> Tensor:
        held, value = self._held[i], self._value(i).detach()
        if held.shape != value.shape or held.dtype != value.dtype:
            module, name = self.places[i]
            raise RecipeError(
                f"The buffer {name} of {type(module).__name__} went from {tuple(held.shape)} "
                f"{held.dtype} to {tuple(value.shape)} {value.dtype} in a forward pass. A buffer "
                "keeps its shape and type, or pieces could not agree on it."
            )
        return _as_real(value).to(torch.float64, copy=True)

    def _value(self, i: int) -> Tensor:
        module, name = self.places[i]
        value = module._buffers[name]
        assert value is not None
        return value

    def _changed(self, i: int) -> bool:
        if self._mark(i) != self._versions[i]:
            return True
        # BatchNorm's kernel writes its statistics without raising their version.
        held = self._held[i]
        if hasattr(held, "fake_mode"):  # no values to compare
            module, _ = self.places[i]
            return isinstance(module, _NormBase) and module.training
        return held.numel() <= LARGE and not torch.equal(held, self._value(i))

    def _mark(self, i: int) -> tuple[int, int]:
        # A forward may write into a buffer or put another tensor in its place.
        value = self._value(i)
        return id(value), value._version

    def _put(self, i: int, value: Tensor) -> None:
        place = self._value(i)
        if isinstance(self.places[i][0], _NormBase):
            # Another piece's backward may still be to come. Its kernel does not read the
            # statistics in training, and writes them without telling autograd itself.
            place = place.data
        with torch.no_grad():
            place.copy_(value)
        self._versions[i] = self._mark(i)


def _as_real(value: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    return torch.view_as_real(value) if value.is_complex() else value


def means_of(totals: list[Tensor | None], counts: Sequence[float]) -> list[Tensor | None]:
    """Turn sums into means over the pieces that changed each buffer."""
    return [
        None if sum_ is None else sum_ / count for sum_, count in zip(totals, counts, strict=True)
    ]
