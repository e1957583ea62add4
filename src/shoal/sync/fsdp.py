"""ZeRO 3: parameters, gradients and optimizer state all sharded; FSDP2 moves them.

`parallel/fsdp.py` has cut the model. While a piece runs, FSDP2 gathers a block's parameters and
sums its gradients into shards; here the ranks agree on losses, on the norm and on the parameters
that FSDP2 left whole, and each steps on its own shards. The message with the losses is the vote:
backward has ended on every rank. Sums are taken in FSDP2's order, so the result is close to one
process's, not equal bit for bit.
"""

from collections.abc import Callable, Sequence
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
from shoal.parallel.fsdp import compare_orders
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices
from shoal.sync.costs import (
    DOUBLE,
    Amount,
    Message,
    StepCosts,
    agreement,
    all_reduce_message,
    as_parameters,
    memory_of_parts,
)
from shoal.sync.lockstep import LockstepStrategy
from shoal.sync.norm import SharedNorm
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import RoundContext
from shoal.sync.state import ParameterRun
from shoal.sync.strategy import GlobalStep, LocalStep


class FullySharded(LockstepStrategy):
    def __init__(self, num_pieces: int, round_size: int = 1):
        super().__init__(num_pieces, round_size)
        self.stepped: dict[str, nn.Parameter] = {}

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        super().attach(model, optimizer, mesh, holding)
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
        compare_orders(self.attached.model)
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

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        gathered, held = _held_meanwhile(layout), "a shard of each parameter"
        memory = memory_of_parts(layout, as_parameters(layout), gathered, held)
        return StepCosts(layout.num_trained, memory, _sent(layout), agreement(layout, apart=True))

    def _counts(self, name: str) -> bool:
        """Whether this rank counts what it holds: each rank has its own shards, the rest is
        replicated."""
        if not self.attached.holding.counts(name):
            return False
        return isinstance(self.named[name], DTensor) or self.mesh.data.rank == 0

    def _sum_rest(self) -> None:
        """Sum the gradients of parameters that FSDP2 left whole: few and small."""
        rest = [p for p in self.named.values() if not isinstance(p, DTensor)]
        for dtype in dict.fromkeys(p.dtype for p in rest):
            alike = [p for p in rest if p.dtype == dtype]
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).view(-1) for p in alike]
            )
            self.mesh.data.all_reduce(flat).wait()
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


def _sent(layout: RankLayout) -> list[Message]:
    """FSDP2 gathers a unit for forward, and again for backward unless it was kept."""
    units, n = layout.gathered_units(), layout.num_replicas
    if n == 1:
        return []
    units_sent = [size for size in units if size]
    pieces = len(layout.rounds) * layout.plan.num_microbatches
    again = [] if layout.stages else [size for size in units[:-1] if size]
    rest = [p for p in layout.trained if not p.is_sharded]
    kinds = [sum(p.num_bytes for p in rest if p.dtype == d) for d in {p.dtype for p in rest}]
    return [
        Message("parameters", "data", "all-gather", *_times(pieces, [*units_sent, *again], n)),
        Message("gradients", "data", "reduce-scatter", *_times(pieces, units_sent, n)),
        all_reduce_message("order of blocks", "data", [2 * n * DOUBLE], layout),
        all_reduce_message("gradients left whole", "data", kinds, layout),
    ]


def _times(pieces: int, units: Sequence[int], n: int) -> tuple[int, int]:
    return pieces * len(units), pieces * sum(size // n * (n - 1) for size in units)


def _held_meanwhile(layout: RankLayout) -> Amount:
    units = layout.gathered_units()
    largest = max(units, default=0)
    if layout.stages:
        # Without a module around them all, FSDP2 keeps each unit until its backward pass.
        return Amount(sum(units) + largest, "all units gathered, the largest one's gradients")
    root, blocks = units[-1], sorted(units[:-1])[-2:]
    words = "two largest units and the rest of the model gathered, the largest one's gradients"
    return Amount(root + sum(blocks) + largest, words)
