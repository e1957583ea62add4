"""Fill tensors from a checkpoint; every byte is verified before it is used.

A rank reads only the chunks that overlap its slices, so a checkpoint loads under any plan, and each
rank reads only its own part. What can be checked without torch is in `verify.py`.
"""

from collections.abc import Sequence

import torch

from shoal.checkpoint.dtypes import dtype_from_name, tensor_bytes
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.errors import UnusableCheckpoint
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.sync.state import read_whole


class CheckpointReader(VerifiedCheckpoint):
    """A verified checkpoint that fills tensors."""

    def dtype(self, name: str) -> torch.dtype:
        return dtype_from_name(self._tensors[name].dtype)

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        """Copy a tensor's values into the slices that a rank holds."""
        if places and name not in self:
            raise UnusableCheckpoint(f"It holds no {name}. Is it another model's?")
        for place in places:
            tensor = self._tensors[name]
            if place.global_shape != tensor.shape or place.tensor.dtype != self.dtype(name):
                raise UnusableCheckpoint(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, and "
                    f"{str(place.tensor.dtype).removeprefix('torch.')} "
                    f"{list(place.global_shape)} is wanted."
                )
            wanted = Box(place.offset, tuple(place.tensor.shape))
            for chunk in tensor.chunks:
                there = chunk.box
                common = wanted.intersect(there)
                if common is not None:
                    content = self.read_chunk(tensor, chunk)
                    source = torch.frombuffer(content, dtype=place.tensor.dtype).view(chunk.shape)
                    target = common.relative_to(wanted).of(place.tensor)
                    target.copy_(common.relative_to(there).of(source))

    def whole(self, name: str) -> torch.Tensor:
        """One tensor, whole."""
        return read_whole(self, name)

    def box(self, name: str, box: Box) -> memoryview:
        """The bytes of a box of a tensor."""
        made = torch.empty(box.shape, dtype=self.dtype(name))
        self.fill(name, [Slice(made, self.shape(name), box.offset)])
        return tensor_bytes(made)
