"""A server's parameters, in memory that workers of the same host read; in lockstep a double buffer.

In lockstep a step is made from one buffer into the other, so workers read the parameters in place,
without a copy of their own, and a step that a death interrupted is done again from the old buffer.
That is copied before a step, once gradients of a first key have come from all, while workers
compute. Out of lockstep there is one buffer, and no worker reads it in place.

Cost: the parameters once more on the server, and none on workers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.comm.shared_memory import SegmentHandle, SharedSegment
from shoal.comm.uncached_copy import copy_uncached
from shoal.sync.server.layout import ServerLayout


class ParameterBuffers:
    """Parameters by key; `now` is the number of the set that holds those of now.

    No worker reads the other set once rows of the next batch have come from all workers: who pushes
    them has left it.
    """

    def __init__(
        self,
        layout: ServerLayout,
        number: int,
        dtypes: Mapping[int, torch.dtype],
        shared: bool = True,
    ):
        """With `shared` in memory that workers read, else in a server's own."""
        self._layout, self._number, self._dtypes = layout, number, dtypes
        self._is_shared = shared
        self._segments: list[SharedSegment] = []
        self._memory: list[Tensor] = []  # the bytes of each set
        self.sets: list[dict[int, Tensor]] = []
        self.now = 0
        self._is_ahead = False  # whether the values of now stand in the other set too
        self._add()

    def add_second(self) -> None:
        """Have two sets from now on; nothing if there are."""
        if len(self.sets) == 1:
            self._add()

    def _add(self) -> None:
        places = self._layout.value_places(self._number)
        memory = torch.zeros(0 if self._is_shared else places[-1], dtype=torch.uint8)
        if self._is_shared:
            self._segments.append(SharedSegment.create(max(1, places[-1])))
            memory = self._segments[-1].bytes
        self._memory.append(memory)
        self.sets.append({})
        for (key, dtype), place in zip(self._dtypes.items(), places, strict=False):
            num_bytes = self._layout.keys[key].num_bytes
            self.sets[-1][key] = memory[place : place + num_bytes].view(dtype)

    @property
    def places(self) -> list[SegmentHandle]:
        return [segment.place for segment in self._segments]

    @property
    def values(self) -> dict[int, Tensor]:
        return self.sets[self.now]

    def copy_forward(self) -> None:
        """Bring the other set to where a step begins."""
        if len(self.sets) > 1 and not self._is_ahead:
            copy_uncached([self._memory[1 - self.now]], [self._memory[self.now]])
            self._is_ahead = True

    def swap(self) -> None:
        """Let the next step change the other set; what is of now stays as it is."""
        if len(self.sets) > 1:
            self.copy_forward()
            self.now, self._is_ahead = 1 - self.now, False

    def mark_replaced(self) -> None:
        """The values of now were replaced."""
        self._is_ahead = False
