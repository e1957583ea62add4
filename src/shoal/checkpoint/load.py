"""Filling tensors from a checkpoint: nothing is believed before it was verified.

A reader takes only the chunks that meet what it holds, so each rank of any plan reads its own part.
What can be said of a checkpoint without torch is in `sealed.py`.
"""

from collections.abc import Sequence

import torch

from shoal.checkpoint.sealed import Sealed
from shoal.checkpoint.types import bytes_of, type_of_name
from shoal.errors import MayBeGood
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.sync.state import read_whole


class Opened(Sealed):
    """A checkpoint that can be loaded."""

    def dtype(self, name: str) -> torch.dtype:
        return type_of_name(self._tensors[name].dtype)

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        """Put a tensor's values where a rank holds parts of it."""
        if places and name not in self:
            raise MayBeGood(f"It holds no {name}. Is it another model's?")
        for place in places:
            tensor = self._tensors[name]
            if place.global_shape != tensor.shape or place.tensor.dtype != self.dtype(name):
                raise MayBeGood(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, and "
                    f"{str(place.tensor.dtype).removeprefix('torch.')} "
                    f"{list(place.global_shape)} is wanted."
                )
            wanted = Box(place.offset, tuple(place.tensor.shape))
            for chunk in tensor.chunks:
                there = chunk.box
                common = wanted.meet(there)
                if common is not None:
                    content = self.content(tensor, chunk)
                    source = torch.frombuffer(content, dtype=place.tensor.dtype).view(chunk.shape)
                    target = common.inside(wanted).of(place.tensor)
                    target.copy_(common.inside(there).of(source))

    def whole(self, name: str) -> torch.Tensor:
        """All of one tensor."""
        return read_whole(self, name)

    def box(self, name: str, box: Box) -> memoryview:
        """The bytes of a box of a tensor."""
        made = torch.empty(box.shape, dtype=self.dtype(name))
        self.fill(name, [Slice(made, self.shape(name), box.offset)])
        return bytes_of(made)
