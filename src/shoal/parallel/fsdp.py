"""ZeRO 3 over PyTorch's FSDP2: parameters themselves are sharded, block by block.

Each block found in the module is gathered when it is needed and let go afterwards, so beside its
shards a rank holds about two blocks at a time. FSDP2 does the gathering and the summing; what it
refuses (parameters without dims) stays whole and is summed by the strategy, `sync/fsdp.py`.

Per rank, in bytes a parameter, fp32 Adam: 16/N, and two blocks. Traffic: parameters come twice and
gradients go once, 1.5 times that of data parallel.

Every rank must run the same blocks in the same order, since all gather each of them: one that skips
a block would take another's parameters for it. `compare_orders` refuses that before an update.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor

from shoal.comm.collectives import Group, UnlikeOperations
from shoal.errors import PlanError
from shoal.numerics.randomness import blocks_that_run
from shoal.parallel.boxes import Box


def units(
    model: nn.Module, owned: Collection[str], but: Collection[nn.Module], whole_model: bool
) -> list[nn.Module]:
    """The modules to gather one at a time, inner ones first: blocks that share no parameter with
    what is outside of them, and the rest with the model itself. `but` names modules that cannot be.

    A stage of a pipeline has no such last unit, since it never runs the whole model: there every
    module outside the blocks that owns parameters is one.
    """
    registrations = _count_registrations(model)
    blocks = [b for b in blocks_that_run(model) if b not in but and _is_closed(b, registrations)]
    if whole_model:
        return [*blocks, model]
    inside = {module for block in blocks for module in block.modules()}
    rest = [m for m in model.modules() if m not in inside and m._parameters and m is not model]
    names = {p: name for name, p in model.named_parameters()}
    return [
        unit
        for unit in [*blocks, *(m for m in rest if m not in but and _is_closed(m, registrations))]
        if any(names[p] in owned for p in unit.parameters())
    ]


def refuse_hooks(model: nn.Module) -> None:
    """FSDP2 puts other parameters in the place of the model's, without their hooks."""
    for name, p in model.named_parameters():
        if has_hooks(p):
            raise PlanError(
                f"The parameter {name} has a hook of its own, which zero=3 would lose: it replaces "
                "parameters by their shards. Use zero=1 or zero=2, or do it in the forward."
            )


def has_hooks(p: Tensor) -> bool:
    """Whether the model has said what to do with a parameter's gradient."""
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def refuse_mixed(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """FSDP2 sends a unit's parameters as one tensor, so they must be of one real dtype."""
    known: set[nn.Parameter] = set()
    names = {p: name for name, p in model.named_parameters()}
    for unit in units:
        own = [p for p in unit.parameters() if _is_sharded(p) and p not in known]
        known.update(own)
        firsts = {p.dtype: names[p] for p in reversed(own)}
        dtypes = [
            f"{name} is {str(dtype).removeprefix('torch.')}"
            for dtype, name in reversed(firsts.items())
        ]
        if len(dtypes) > 1 or any(dtype.is_complex for dtype in firsts):
            raise PlanError(
                f"zero=3 cannot shard this model: {' and '.join(dtypes)}. It gathers the "
                "parameters of a block, and all that are outside of blocks, as one tensor of one "
                "real dtype. Use zero=1 or zero=2; real dtypes may also each have a block of their "
                "own (an entry of a ModuleList)."
            )


def shard_parameters(
    model: nn.Module, units: Sequence[nn.Module], group: Group, device: str
) -> None:
    """Shard the units of a model in place."""
    mesh = group.device_mesh(device)
    names = {module: name or "the model" for name, module in model.named_modules()}
    order = _UnitOrder(group, [names[unit] for unit in units])
    for unit in units:
        # Frozen ones, those of other stages among them, cost no gradient and no state.
        whole = {p for p in unit.parameters() if not _is_sharded(p)}
        if any(p not in whole for p in unit.parameters()):
            # What is left with the model itself is needed first again: FSDP2 keeps it gathered.
            let_go = None if unit is model else True
            fully_shard(unit, mesh=mesh, ignored_params=whole, reshard_after_forward=let_go)
            assert isinstance(unit, FSDPModule)
            # A sum, as elsewhere; and one for every parameter on every rank, used there or not.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True)
            unit.set_custom_all_gather(_CountedGather(group, names[unit], order))
            unit.set_custom_reduce_scatter(_CountedScatter(group, names[unit], order))


def _is_sharded(p: nn.Parameter) -> bool:
    """FSDP2 takes none without dims, and its sums none without elements."""
    return bool(p.dim() and p.numel() and p.requires_grad)


class _UnitOrder:
    """The units that this rank gathered and summed since the ranks last compared."""

    def __init__(self, group: Group, units: Sequence[str]):
        self._group = group
        self._names = {zlib.crc32(unit.encode()): unit for unit in units}
        self._begin()

    def _begin(self) -> None:
        self._digest, self._first = 0, list[int]()

    def note(self, unit: str) -> None:
        self._digest = zlib.crc32(unit.encode(), self._digest)
        if len(self._first) < _MOST_NAMED:
            self._first.append(zlib.crc32(unit.encode()))

    def compare(self) -> None:
        try:
            rows = self._group.all_gather_numbers([self._digest, len(self._first)])
        except UnlikeOperations:  # a rank is at a block that this one did not run
            raise PlanError(_UNLIKE_FORWARDS) from None
        first, longest = self._first, max(int(length) for _, length in rows)
        self._begin()
        if any(row != rows[0] for row in rows):
            told = self._group.all_gather_numbers([*first, *[0] * (longest - len(first))])
            raise PlanError(" ".join([*self._where(told), _UNLIKE_FORWARDS]))

    def _where(self, told: list[list[float]]) -> Iterator[str]:
        """The first place at which two ranks are not at the same unit, in words."""
        for place in zip(*told, strict=True):
            for rank, code in enumerate(place):
                if code != place[0]:
                    at, other = self._name(place[0]), self._name(code)
                    yield f"Rank 0 was at {at}, rank {rank} at {other}."
                    return

    def _name(self, code: float) -> str:
        return self._names.get(int(code), "the end of the step")


_MOST_NAMED = 1000  # places at which a difference is named
_UNLIKE_FORWARDS = (
    "Forwards of ranks are not alike, and under zero=3 all must run the same blocks: those that "
    "are skipped at random or by their data (layerdrop, experts without a sample) do not go with "
    "it. Use zero=1 or zero=2, or run such blocks on no samples."
)


def compare_orders(model: nn.Module) -> None:
    """Refuse it if ranks ran unlike blocks of a sharded model. Every rank must reach this."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                gather = group._all_gather_comm
                assert isinstance(gather, _CountedGather)
                gather.order.compare()
                return


class _CountedGather(DefaultAllGather):
    """FSDP2's own, with its bytes added to the group's, and on record."""

    def __init__(self, counted: Group, unit: str, order: _UnitOrder):
        self._counted, self._unit, self.order = counted, unit, order

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **more: Any) -> Any:
        self._counted.bytes_sent += input_tensor.nbytes * (self._counted.num_ranks - 1)
        self.order.note(self._unit)
        record = self._counted.begin("all-gather", output_tensor.nbytes, self._unit)
        work = super().__call__(output_tensor, input_tensor, *rest, **more)
        record.end()  # which on a GPU is when it was queued
        return work


class _CountedScatter(DefaultReduceScatter):
    """Likewise; `sum_instead` sums rows of the input in its stead, if there is one."""

    sum_instead: Callable[[Tensor, Tensor], None] | None = None

    def __init__(self, counted: Group, unit: str, order: _UnitOrder):
        self._counted, self._unit, self.order = counted, unit, order

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **more: Any) -> Any:
        self.order.note(self._unit)
        if self.sum_instead is not None:
            self.sum_instead(output_tensor, input_tensor)
            return None
        self._counted.bytes_sent += output_tensor.nbytes * (self._counted.num_ranks - 1)
        record = self._counted.begin("reduce-scatter", input_tensor.nbytes, self._unit)
        work = super().__call__(output_tensor, input_tensor, *rest, **more)
        record.end()
        return work


def held_parameters(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters, or its shards of them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward leaves the outermost unit gathered
    return {
        name: p._local_tensor if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }


@contextmanager
def without_fsdp(model: nn.Module) -> Iterator[None]:
    """Run the model without FSDP2: nothing is gathered, and sharded parameters are zeros.

    For a forward that one replica makes alone, to see what it does and not what comes out.
    """
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, DTensor):
                parameters.append((module, name, p))
                zeros = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=p.requires_grad)
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for own, handle in (
                (module._forward_pre_hooks, state._pre_forward_hook_handle),
                (module._forward_hooks, state._post_forward_hook_handle),
            ):
                hooks.append((own, dict(own)))
                own.pop(handle.id, None)
    try:
        yield
    finally:
        for own, before in hooks:
            own.clear()
            own.update(before)
        for module, name, p in parameters:
            module._parameters[name] = p


def shard_boxes(model: nn.Module, group: Group) -> dict[str, Box]:
    """Which rows of each sharded parameter this rank holds."""
    found = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            rows = -(-p.shape[0] // group.num_ranks)
            first = min(group.rank * rows, p.shape[0])
            rows = min(rows, p.shape[0] - first)
            found[name] = Box((first, *[0] * (p.dim() - 1)), (rows, *p.shape[1:]))
    return found


def _count_registrations(module: nn.Module) -> Counter[nn.Parameter]:
    """How often each parameter is registered in the modules below one."""
    return Counter(
        p
        for owner in dict.fromkeys(module.modules())
        for p in owner._parameters.values()
        if p is not None
    )


def _is_closed(module: nn.Module, registrations: Counter[nn.Parameter]) -> bool:
    """Whether a module has parameters, and the model registers them nowhere else."""
    inside = _count_registrations(module)
    return bool(inside) and all(registrations[p] == count for p, count in inside.items())
