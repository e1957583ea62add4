"""What strategies share in which all ranks commit every step together: AllReduce and the ZeROs.

A newcomer takes the whole state of the rank that leads, in the form that a checkpoint has, so what
is saved and what is handed over are one. Each strategy adds its own way to sum gradients.
"""

import torch
from torch import nn

from shoal.comm.buckets import BUCKET_BYTES
from shoal.comm.mesh import Mesh
from shoal.parallel.layout import WHOLE, LocalLayout
from shoal.sync.gradient_packing import GradientPacking
from shoal.sync.rounds import AttachedModel
from shoal.sync.state import ShardedState, StateSource
from shoal.sync.strategy import ServerLink


class LockstepStrategy:
    """`round_size` pieces are in a pipeline together and count as one term of the sum."""

    in_lockstep = True
    servers: ServerLink | None = None

    def __init__(
        self,
        num_pieces: int,
        round_size: int = 1,
        packing: GradientPacking | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.num_pieces, self.round_size, self.packing = num_pieces, round_size, packing
        self.bucket_bytes, self.is_attached = bucket_bytes, False

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        """A strategy calls it first in its own."""
        self.mesh, self.is_attached = mesh, True
        self.attached = AttachedModel(
            model, optimizer, mesh, holding, self.num_pieces, self.round_size
        )
        self.rounds, self.buffers = self.attached.rounds, self.attached.rounds.buffers

    def state_dict(self) -> ShardedState:
        state = self.attached.state().state_dict()
        if (packing := self._active) is None:
            return state
        tensors, plain = packing.state()
        return state._replace(tensors=state.tensors | tensors, plain=state.plain | plain)

    def load_state_dict(self, source: StateSource, step: int) -> None:
        self.attached.load_state_dict(source)
        if (packing := self._active) is not None:
            packing.load(source, step)

    def newcomer_step(self) -> int:
        return 0

    def newcomer_state(self) -> ShardedState:
        """Without what packing has not sent, which each replica has its own of."""
        state, packing = self.attached.state().state_dict(), self._active
        if packing is None:
            return state
        tensors, plain = state.tensors | packing.shared(), state.plain | packing.plain
        return state._replace(tensors=tensors, plain=plain)

    def join(self, source: StateSource, step: int) -> None:
        self.attached.load_state_dict(source)
        if (packing := self._active) is not None:
            packing.join(source, step)

    @property
    def _active(self) -> GradientPacking | None:
        """None also where there is no other replica to send anything to."""
        return self.packing if self.mesh.data.num_ranks > 1 else None
