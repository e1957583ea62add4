"""Parameters of a worker as views of a server's memory.

In lockstep on one host a pull then copies nothing: a parameter becomes a view of the buffer that
the server stepped on last (`parameter_buffers.py`). A parameter that is spread over several servers
cannot be one view, and one that shares its memory with another tensor, or is not contiguous, must
stay where it is: these are copied, as all are between hosts and out of lockstep.

A write to such a parameter writes into the server's memory; only optimizers may do it.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.shared_memory import SharedSegment
from shoal.sync.server.layout import ServerLayout


class ParameterAddress(NamedTuple):
    """Where all of a parameter is in a server's memory."""

    server: int
    start: int  # byte


class ParameterViews:
    def __init__(self, layout: ServerLayout, model: nn.Module, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        alone = _unshared_parameters(model, parameters)
        self._stands = {i: stand for i, stand in parameter_addresses(layout).items() if i in alone}
        self._shown: set[int] = set()  # parameters that are not in memory of their own

    def of(self, server: int, segment: SharedSegment) -> list[tuple[int, Tensor]]:
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


def parameter_addresses(layout: ServerLayout) -> dict[int, ParameterAddress]:
    """Of the parameters that are contiguous on one server, by their numbers. Pure."""
    # Of each parameter its runs: where in it, its bytes, and where it is.
    runs: dict[int, list[tuple[int, int, ParameterAddress]]] = {}
    for server in {*layout.holders}:
        for key, place in zip(layout.held_by(server), layout.value_places(server), strict=False):
            size = layout.keys[key].itemsize
            for s in layout.segments(key):
                stand = ParameterAddress(server, place + s.place * size)
                runs.setdefault(s.parameter, []).append((s.start, s.length * size, stand))
    return {
        i: min(own)[2]
        for i, own in runs.items()
        if all(
            b == ParameterAddress(a.server, a.start + num_bytes)
            for (_, num_bytes, a), (_, _, b) in pairwise(sorted(own))
        )
    }


def _unshared_parameters(model: nn.Module, parameters: Sequence[nn.Parameter]) -> set[int]:
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
