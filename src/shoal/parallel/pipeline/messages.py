"""Point-to-point messages between the ranks of a pipeline.

Transports match the messages of two ranks in the order in which both post them, so every rank
posts in the order of `schedules.py`. Errors of the transport, and no others, become `GroupLost`.
A receive gets memory of its own: what backward makes of a gradient may be that very tensor, and
is kept after the round.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collectives import Group, as_group_lost
from shoal.comm.flight_recorder import RECORDER, CollectiveRecord

_TAG = 0


class TensorForm(NamedTuple):
    """The shape and dtype of a tensor to receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PendingReceive(NamedTuple):
    """Tensors that are there once the works are done."""

    tensors: list[Tensor]
    works: Sequence[dist.Work] = ()
    record: CollectiveRecord | None = None


def most_leaving(num_ranks: int) -> int:
    """Sends whose tensors are kept: as many as 1f1b has under way there and back. An older one has
    arrived, unless the other rank is that far behind."""
    return 2 * num_ranks


class Messages:
    """What one rank sends and receives, in training and evaluation."""

    def __init__(self, group: Group, device: torch.device):
        self.group, self.device = group, device
        self._most_leaving = most_leaving(group.num_ranks)
        self._leaving: deque[list[tuple[dist.Work, Tensor]]] = deque()

    @property
    def handle(self) -> dist.ProcessGroup:
        """Called directly, since torch's isend and irecv look up the group and rank each time."""
        assert self.group.handle is not None  # there are other ranks
        return self.group.handle

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Start sending; the tensors must not change until `drain`."""
        leaving = []
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        record = self.group.begin_message(rank, num_bytes, sends=True)
        with as_group_lost(f"sending to rank {rank} of the pipeline"):
            for tensor in tensors:
                leaving.append((self.handle.send([_real(tensor)], rank, _TAG), tensor))
                self.group.bytes_sent += tensor.nbytes
        record.end()  # as far as this rank is concerned: it waits for none
        self._leaving.append(leaving)
        if len(self._leaving) > self._most_leaving:
            self._drain_to(self._most_leaving)

    def receive(self, forms: Sequence[TensorForm], rank: int) -> PendingReceive:
        """Start receiving."""
        tensors = [torch.empty(f.shape, dtype=f.dtype, device=self.device) for f in forms]
        with as_group_lost(f"receiving from rank {rank} of the pipeline"):
            works = [self.handle.recv([_real(tensor)], rank, _TAG) for tensor in tensors]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return PendingReceive(
            tensors, works, self.group.begin_message(rank, num_bytes, sends=False)
        )

    def wait(self, arriving: PendingReceive) -> list[Tensor]:
        """The tensors, once they are there."""
        told = "waiting for another stage of the pipeline:"
        with as_group_lost(told, arriving.record), RECORDER.blocked, RECORDER.waited:
            for work in arriving.works:
                work.wait()
        if arriving.record is not None:
            arriving.record.end()
        return arriving.tensors

    def drain(self) -> None:
        """Wait until all that was sent has left."""
        self._drain_to(0)

    def forget(self) -> None:
        """Call after an error: the receiver may be gone."""
        self._leaving.clear()

    def _drain_to(self, count: int) -> None:
        with as_group_lost("sending to another stage of the pipeline"):
            while len(self._leaving) > count:
                for work, _ in self._leaving.popleft():
                    work.wait()


def _real(tensor: Tensor) -> Tensor:
    """As transports take it."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
