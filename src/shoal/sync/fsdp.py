"""ZeRO 3: parameters, gradients and optimizer state all sharded; FSDP2 moves them.

`parallel/fsdp.py` has cut the model. While a piece runs, FSDP2 gathers a block's parameters and
sums its gradients into shards; here the ranks agree on losses, on the norm and on the parameters
that FSDP2 left whole, and each steps on its own shards. The message with the losses is the vote:
backward has ended on every rank. Sums are taken in FSDP2's order, so the result is close to one
process's, not equal bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.comm.compression import Wanted
from shoal.comm.mesh import Mesh
from shoal.numerics.momentum import Momentum, corrected_momenta, without_momentum
from shoal.numerics.norms import num_blocks
from shoal.numerics.optimizers import ParameterPart, swap_parameters
from shoal.parallel.fsdp import compare_orders
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices
from shoal.sync.costs import (
    DOUBLE,
    Amount,
    Message,
    StepCosts,
    added_up,
    agreement,
    all_reduce_message,
    as_parameters,
    memory_of_parts,
    tree_message,
)
from shoal.sync.gradient_packing import GradientPacking, PackedBucket, aligned_starts
from shoal.sync.lockstep import LockstepStrategy
from shoal.sync.norm import SharedNorm
from shoal.sync.packed_units import PackedUnit, UnitScatter
from shoal.sync.packing_costs import packed_unit_messages, residual_memory
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import RoundContext, blocks_by_rank, ranks_tree
from shoal.sync.state import ParameterRun
from shoal.sync.strategy import GlobalStep, LocalStep


class FullySharded(LockstepStrategy):
    def __init__(
        self, num_pieces: int, round_size: int = 1, packing: GradientPacking | None = None
    ):
        super().__init__(num_pieces, round_size, packing)
        self.stepped: dict[str, nn.Parameter] = {}
        self._momenta: dict[Tensor, Momentum] = {}
        self._packed: set[str] = set()  # parameters
        self._scatters: dict[str, UnitScatter] = {}  # that sum them, if gradients are packed

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
        self._tree = ranks_tree(mesh.data)
        if not self.stepped:  # else it was done in an earlier attach, in the same seat
            if self.packing is not None:
                self._momenta = corrected_momenta(self.packing.name, optimizer)
            self._step_on_shards()
        if self._active is not None:
            self._pack(self._active)
        self.attached.runs = {p: ParameterRun(name, p.shape) for name, p in self.stepped.items()}
        self.counted = [n for n in self.named if self._counts(n)]
        self._numbers = {name: index for index, name in enumerate(self.named)}
        lengths = [
            self._scatters[n].num_counted(self._numbers[n])
            if n in self._scatters
            else self.stepped[n].numel()
            for n in self.counted
        ]
        self._norm = SharedNorm(mesh.world, sum(map(num_blocks, lengths)))
        self._around = RoundContext(self.rounds, lambda last: None)

    def detach(self) -> None:
        self.buffers.restore()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self._touched = set()
            for name, p in self.named.items():
                p.grad = self.stepped[name].grad = None
            self.buffers.begin()
            if self.packing is not None:
                self.packing.begin()
            for scatter in self._scatters.values():
                scatter.begin()
        return self._around

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        compare_orders(self.attached.model)
        # FSDP2 gives a gradient of zeros to what no piece used, which must not decay for that.
        own = [
            p in self._touched or (name in self._packed and _is_any(p.grad))
            if isinstance(p, DTensor)
            else p.grad is not None
            for name, p in self.named.items()
        ]
        self._sum_rest()
        agreed, touched = self.rounds.agree(local, own)
        for (name, p), used in zip(self.named.items(), touched, strict=True):
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            self.stepped[name].grad = gradient if used else None
        if not want_norm:
            return agreed
        return agreed._replace(norm=self._norm.of(self._counted_gradients()))

    def _counted_gradients(self) -> Iterator[Tensor]:
        for name in self.counted:
            own, scatter = self.stepped[name].grad, self._scatters.get(name)
            if own is not None and scatter is not None:
                own = scatter.counted(self._numbers[name], own)
            if own is not None:
                yield own

    def update(self, scale: float, check: bool = True) -> bool:
        packing = self._active
        own = (p.grad for p in self.stepped.values() if p.grad is not None)
        # What is not finite must not stay in what was not sent.
        checks = check or packing is not None
        if not self.attached.update(own, scale, checks, self._step):
            return False
        if packing is not None:
            packing.commit()
        return True

    def _step(self) -> None:
        corrected = {self.stepped[n] for n in self._packed} if self._momenta else set()
        optimizer = self.attached.optimizer
        with without_momentum(optimizer, corrected) if corrected else nullcontext():
            self.attached.step()

    def gradients(self) -> dict[str, list[Slice]]:
        found = {n: p.grad for n, p in self.stepped.items() if p.grad is not None}
        return slices(found, self.attached.holding)

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        held = "a shard of each parameter"
        extra = added_up(_held_meanwhile(layout), residual_memory(layout, owes=False))
        memory = memory_of_parts(layout, as_parameters(layout), extra, held)
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
            sum_ = self._tree.start([flat])
            sum_.fold()
            flat = sum_.finish()
            for p, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                p.grad = part.view(p.shape)

    def _pack(self, packing: GradientPacking) -> None:
        """Let gradients be packed where FSDP2 would sum them, unit by unit."""
        numbers: dict[Tensor, int] = {p: i for i, p in enumerate(self.named.values())}
        named, group, shown = list(self.named.items()), self.mesh.data, list[PackedBucket]()
        units = [(one, _numbers_in(one, numbers)) for one in _parameter_groups(self.attached.model)]
        wanted, self._scatters, self._packed = list[Wanted](), {}, set()
        for number, (held, indices) in enumerate(units):
            sizes = [(i, tuple(named[i][1].shape), named[i][1].itemsize) for i in indices]
            unit = PackedUnit.of(sizes, packing.name, group.num_ranks)
            lengths = [t.length for t in unit.packed]
            starts = aligned_starts(lengths) if unit.packed else None
            shown.append(PackedBucket([t.number for t in unit.packed], lengths, starts))
            wanted.append(unit.wanted(group.num_ranks))
            pack = partial(packing.scatter, number)
            scatter = UnitScatter(group, unit, pack, lambda index: named[index][1].requires_grad)
            held._reduce_scatter_comm.sum_instead = scatter
            self._scatters |= {named[i][0]: scatter for i in indices}
            self._packed |= {named[t.number][0] for t in unit.packed}
        whole = self.attached.holding._replace(within=MappingProxyType({}))
        packing.attach(group, named, whole, shown, self._momenta, wanted)

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
        for group in _parameter_groups(self.attached.model):
            group.post_backward = partial(self._note, group, group.post_backward)

    def _note(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        for held in group.fsdp_params:
            if hasattr(held, "_unsharded_param") and held.unsharded_param.grad is not None:
                self._touched.add(held.sharded_param)
        post_backward(*args)
        if self.rounds.device.type == "cpu":  # where the sum is done when this returns
            group.comm_ctx.reduce_scatter_states.clear()


def _parameter_groups(model: nn.Module) -> Iterator[Any]:
    """What FSDP2 holds of each unit, in the order of modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _numbers_in(group: Any, numbers: Mapping[Tensor, int]) -> list[int]:
    """Of the parameters of a unit, in the order in which FSDP2 sums them."""
    return [numbers[held.sharded_param] for held in group.fsdp_params]


def _is_any(gradient: Tensor | None) -> bool:
    """Whether a shard of a gradient has anything in it."""
    return isinstance(gradient, DTensor) and bool(gradient.to_local().any())


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
    kinds = {p.dtype for p in rest}
    rows = [(sum(p.num_elements for p in rest if p.dtype == d), d.itemsize) for d in kinds]
    summed = [Message("gradients", "data", "reduce-scatter", *_times(pieces, units_sent, n))]
    if layout.plan.packed_codec != "none":
        summed = packed_unit_messages(layout)
    return [
        Message("parameters", "data", "all-gather", *_times(pieces, [*units_sent, *again], n)),
        *summed,
        all_reduce_message("order of blocks", "data", [2 * n * DOUBLE], layout),
        tree_message("gradients left whole", rows, blocks_by_rank(n, n), layout),
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
