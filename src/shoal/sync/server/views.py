"""Parameters of a worker that stand in the memory of a server, instead of in its own.

In lockstep on one host a pull then copies nothing: a parameter is shown the set of values that the
server made last (`sets.py`). A parameter whose elements several servers hold cannot be one tensor
there, and one that shares its memory with another tensor, or is laid out in its own way, must stay
where it is: these are copied, as all are between hosts and out of lockstep.

Whoever writes into a parameter writes into the server's memory; only optimizers may.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.shared_memory import Segment
from shoal.sync.server.layout import Layout


class Stand(NamedTuple):
    """Where all of a parameter is in a server's memory."""

    server: int
    start: int  # byte


class Views:
    def __init__(self, layout: Layout, model: nn.Module, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        alone = _alone(model, parameters)
        self._stands = {i: stand for i, stand in stands_of(layout).items() if i in alone}
        self._shown: set[int] = set()  # parameters that are not in memory of their own

    def of(self, server: int, segment: Segment) -> list[tuple[int, Tensor]]:
        """The parameters that are whole in one of a server's sets, each by its number."""
        found = []
        for i, stand in self._stands.items():
            if stand.server == server:
                p = self._parameters[i]
                own = segment.bytes[stand.start : stand.start + p.nbytes].numpy()
                # Each with a storage of its own: who saves one tensor must not save them all.
                found.append((i, torch.from_numpy(own).view(p.dtype).view(p.shape)))
        return found

    def show(self, views: Sequence[tuple[int, Tensor]]) -> None:
        """Let parameters be these."""
        for i, view in views:
            self._parameters[i].data = view
        self._shown.update(i for i, _ in views)

    def take_back(self) -> None:
        """Give each parameter memory of its own again, with the values that it has."""
        for i in self._shown:
            self._parameters[i].data = self._parameters[i].data.clone()
        self._shown.clear()


def stands_of(layout: Layout) -> dict[int, Stand]:
    """Of the parameters that one server holds in one stretch, by their numbers. Pure."""
    runs: dict[int, list[tuple[int, int, Stand]]] = {}  # where in it, its bytes, and where it is
    for server in {*layout.holders}:
        for key, place in zip(layout.held_by(server), layout.value_places(server), strict=False):
            size = layout.keys[key].itemsize
            for s in layout.segments(key):
                stand = Stand(server, place + s.place * size)
                runs.setdefault(s.parameter, []).append((s.start, s.length * size, stand))
    return {
        i: min(own)[2]
        for i, own in runs.items()
        if all(
            b == Stand(a.server, a.start + num_bytes)
            for (_, num_bytes, a), (_, _, b) in pairwise(sorted(own))
        )
    }


def _alone(model: nn.Module, parameters: Sequence[nn.Parameter]) -> set[int]:
    """Those in plain memory that no other tensor of the model uses."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = [t.detach() for t in tensors if t.layout == torch.strided]
    users = Counter(t.untyped_storage().data_ptr() for t in plain)
    return {
        i
        for i, p in enumerate(parameters)
        if p.device.type == "cpu"
        and type(p.detach()) is Tensor
        and p.is_contiguous()
        and users[p.untyped_storage().data_ptr()] == 1
    }
