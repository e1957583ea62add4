"""Where a server's parameters stand, in memory that workers of the same host read.

In lockstep there are two sets. A step is made from one into the other, so that workers read the
parameters where they are, without a copy of their own, and a step that a death tore is done again
from the old ones, which are still there. Those are copied before a step, once gradients of a first
key have come from all, while workers compute. Out of lockstep there is one set, and nobody reads it
here.

Cost: the parameters once more on the server, and none on workers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.comm.shared_memory import Place, Segment
from shoal.comm.streaming import stream
from shoal.sync.server.layout import Layout


class ValueSets:
    """Parameters by key; `now` is the number of the set that holds those of now.

    Nobody reads the other set once rows of the next batch have come from all workers: who pushes
    them has left it.
    """

    def __init__(
        self, layout: Layout, number: int, dtypes: Mapping[int, torch.dtype], shared: bool = True
    ):
        """With `shared` in memory that workers read, else in a server's own."""
        self._layout, self._number, self._dtypes = layout, number, dtypes
        self._is_shared = shared
        self._segments: list[Segment] = []
        self._rooms: list[Tensor] = []  # the bytes of each set
        self.sets: list[dict[int, Tensor]] = []
        self.now = 0
        self._is_ahead = False  # whether the values of now stand in the other set too
        self._add()

    def double(self) -> None:
        """Have two sets from now on; nothing if there are."""
        if len(self.sets) == 1:
            self._add()

    def _add(self) -> None:
        places = self._layout.value_places(self._number)
        room = torch.zeros(0 if self._is_shared else places[-1], dtype=torch.uint8)
        if self._is_shared:
            self._segments.append(Segment.create(max(1, places[-1])))
            room = self._segments[-1].bytes
        self._rooms.append(room)
        self.sets.append({})
        for (key, dtype), place in zip(self._dtypes.items(), places, strict=False):
            num_bytes = self._layout.keys[key].num_bytes
            self.sets[-1][key] = room[place : place + num_bytes].view(dtype)

    @property
    def places(self) -> list[Place]:
        return [segment.place for segment in self._segments]

    @property
    def values(self) -> dict[int, Tensor]:
        return self.sets[self.now]

    def copy_ahead(self) -> None:
        """Bring the other set to where a step begins."""
        if len(self.sets) > 1 and not self._is_ahead:
            stream([self._rooms[1 - self.now]], [self._rooms[self.now]])
            self._is_ahead = True

    def turn(self) -> None:
        """Let the next step change the other set; what is of now stays as it is."""
        if len(self.sets) > 1:
            self.copy_ahead()
            self.now, self._is_ahead = 1 - self.now, False

    def changed(self) -> None:
        """The values of now were replaced."""
        self._is_ahead = False
