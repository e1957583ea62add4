"""Facts about a model that hold for any plan: its optimizer's state, its buffers, its units.

The optimizer's state is found by one step on tiny stand-ins of the parameters. `explain.py` asks
for the plan at hand, `profile.py` for all plans at once.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RecipeError
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.optimizers import ParameterPart, put_parts, stepper
from shoal.sync.rank_layout import StateTensor

_TINY = (2, 3, 5, 7, 11, 13)  # sizes of a stand-in; all differ, so that state shows its dims


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, in the order of `PieceBuffers`; also those that no state dict has."""
    return {
        f"{path}.{name}".strip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def changed_buffers(model: nn.Module, held: PieceBuffers) -> dict[str, int]:
    """The elements of the buffers that are not as they were held; they are put back."""
    written = {(id(module), name) for module, name in held.changed()}
    rows = zip(buffers_of(model), held.places, held.shapes(), strict=True)
    found = {
        name: shape.numel() for name, (module, own), shape in rows if (id(module), own) in written
    }
    held.restore()
    return found


def optimizer_state_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, tables: Collection[Tensor]
) -> dict[str, list[StateTensor]]:
    """The optimizer's state of each parameter, found by one step on stand-ins of a few elements."""
    stand_ins = put_stand_ins(optimizer, model, tables)
    try:
        stepper(optimizer)()
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(
            f"{type(optimizer).__name__} cannot step on parameters of a few elements, which shows "
            f"what it keeps of each: {error}. An optimizer must take tensors of any size."
        ) from error
    kept = {
        name: [_kept(value, tiny) for value in optimizer.state.get(tiny, {}).values()]
        for name, tiny in stand_ins.items()
    }
    return {name: [one for one in parts if one is not None] for name, parts in kept.items()}


def put_stand_ins(
    optimizer: torch.optim.Optimizer, model: nn.Module, tables: Collection[Tensor]
) -> dict[str, nn.Parameter]:
    """Let the optimizer step on tensors of a few elements, each with a gradient, by name."""
    names = {p: name for name, p in model.named_parameters()}
    stand_ins: dict[str, nn.Parameter] = {}

    def stand_in(p: nn.Parameter) -> list[ParameterPart]:
        sizes = [*_TINY, *[1] * p.dim()][: p.dim()]
        tiny = stand_ins[names[p]] = nn.Parameter(torch.ones(sizes, dtype=p.dtype))
        dense = torch.ones_like(tiny)
        tiny.grad = dense.to_sparse(1) if p in tables else dense
        return [ParameterPart(tiny, lambda _: torch.zeros_like(tiny))]

    put_parts(optimizer, stand_in)
    return stand_ins


def _kept(value: Any, tiny: nn.Parameter) -> StateTensor | None:
    if not isinstance(value, Tensor):
        return None
    if value.shape == tiny.shape and value.dim():
        return StateTensor(None, value.element_size())
    sizes = list(tiny.shape)
    return StateTensor(
        tuple(sizes.index(n) for n in value.shape if n in sizes), value.element_size()
    )
