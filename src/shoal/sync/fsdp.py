"""ZeRO 3: parameters, gradients and optimizer state all sharded; FSDP2 moves them.

`parallel/fsdp.py` has cut the model. While a piece runs, FSDP2 gathers a block's parameters and
sums its gradients into shards; here the ranks agree on losses, on the norm and on the parameters
that FSDP2 left whole, and each steps on its own shards. The message with the losses is the vote:
backward has ended on every rank. Sums are taken in FSDP2's order, so the result is close to one
process's, not equal bit for bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.comm.mesh import Mesh
from shoal.numerics.norms import num_blocks
from shoal.numerics.optimizers import ParameterPart, swap_parameters
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices
from shoal.sync.norm import SharedNorm
from shoal.sync.rounds import AttachedModel, RoundContext
from shoal.sync.state import ParameterRun, ShardedState, StateSource
from shoal.sync.strategy import GlobalStep, LocalStep, ServerLink


class FullySharded:
    in_lockstep, begins_at = True, 0
    late_mark: int | None = None
    servers: ServerLink | None = None

    def __init__(self, num_pieces: int, round_size: int = 1):
        self.num_pieces, self.round_size = num_pieces, round_size
        self.stepped: dict[str, nn.Parameter] = {}

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        self.attached = AttachedModel(
            model, optimizer, mesh, holding, self.num_pieces, self.round_size
        )
        self.rounds, self.buffers = self.attached.rounds, self.attached.rounds.buffers
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._touched: set[nn.Parameter] = set()
        if not self.stepped:  # else it was done in an earlier attach, in the same seat
            self._step_on_shards()
        self.attached.runs = {p: ParameterRun(name, p.shape) for name, p in self.stepped.items()}
        self.counted = [n for n in self.named if self._counts(n)]
        self._norm = SharedNorm(
            mesh.world, sum(num_blocks(self.stepped[n].numel()) for n in self.counted)
        )
        self._around = RoundContext(self.rounds, lambda last: None)

    def detach(self) -> None:
        self.buffers.restore()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self._touched = set()
            for name, p in self.named.items():
                p.grad = self.stepped[name].grad = None
            self.buffers.begin()
        return self._around

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        # FSDP2 gives a gradient of zeros to what no piece used, which must not decay for that.
        own = [
            p in self._touched if isinstance(p, DTensor) else p.grad is not None
            for p in self.named.values()
        ]
        self._sum_rest()
        agreed, touched = self.rounds.agree(local, own)
        for (name, p), used in zip(self.named.items(), touched, strict=True):
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            self.stepped[name].grad = gradient if used else None
        if not want_norm:
            return agreed
        found = (self.stepped[name].grad for name in self.counted)
        return agreed._replace(norm=self._norm.of(g for g in found if g is not None))

    def update(self, scale: float, check: bool = True) -> bool:
        own = (p.grad for p in self.stepped.values() if p.grad is not None)
        return self.attached.update(own, scale, check, self.attached.step)

    def gradients(self) -> dict[str, list[Slice]]:
        found = {n: p.grad for n, p in self.stepped.items() if p.grad is not None}
        return slices(found, self.attached.holding)

    def state_dict(self, served: bool = True) -> ShardedState:
        return self.attached.state().state_dict()

    def load_state_dict(self, source: StateSource, step: int, served: bool = True) -> None:
        self.attached.load_state_dict(source)

    def _counts(self, name: str) -> bool:
        """Whether this rank counts what it holds: each rank has its own shards, the rest is
        replicated."""
        if not self.attached.holding.counts(name):
            return False
        return isinstance(self.named[name], DTensor) or self.attached.mesh.data.rank == 0

    def _sum_rest(self) -> None:
        """Sum the gradients of parameters that FSDP2 left whole: few and small."""
        rest = [p for p in self.named.values() if not isinstance(p, DTensor)]
        for dtype in dict.fromkeys(p.dtype for p in rest):
            alike = [p for p in rest if p.dtype == dtype]
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).view(-1) for p in alike]
            )
            self.attached.mesh.data.all_reduce(flat).wait()
            for p, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                p.grad = part.view(p.shape)

    def _step_on_shards(self) -> None:
        self.stepped = {n: _local(p) for n, p in self.named.items()}
        parts: dict[nn.Parameter, list[ParameterPart]] = {
            p: [ParameterPart(self.stepped[n], lambda tensor: tensor)]
            for n, p in self.named.items()
            if isinstance(p, DTensor)
        }
        swap_parameters(self.attached.optimizer, parts.get)
        self._watch()

    def _watch(self) -> None:
        """Note which parameters a backward pass touched, before FSDP2 fills in zeros."""
        for module in self.attached.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    noted = partial(self._note, group, group.post_backward)
                    group.post_backward = noted  # type: ignore[method-assign]

    def _note(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        for held in group.fsdp_params:
            if hasattr(held, "_unsharded_param") and held.unsharded_param.grad is not None:
                self._touched.add(held.sharded_param)
        post_backward(*args)
        if self.rounds.device.type == "cpu":  # where the sum is done when this returns
            group.comm_ctx.reduce_scatter_states.clear()


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """What to step on: the parameter, or this rank's shard of it, in the same memory."""
    if isinstance(parameter, DTensor):
        return nn.Parameter(parameter._local_tensor.detach())
    return parameter
