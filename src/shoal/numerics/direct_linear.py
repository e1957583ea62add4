"""Linear layers whose weight's gradient is computed where it is wanted, without a copy.

Autograd puts each gradient into memory of its own, from where a copy takes it to where others read
it: for a large layer and a small batch that is a tenth of a step. Here backward multiplies into the
place itself, and hands autograd a view of it, so that all that follows is as ever (hooks, what else
uses the weight, `p.grad`), and so are the bits. Wherever that could be wrong, the layer computes as
torch's own does: without gradients, under autocast or a compiler, with a graph of the backward,
in pieces that are not the last, or if the weight is used twice.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shoal.numerics.compiled import is_transformed

LEAST_ELEMENTS = 1 << 16  # of a weight: below, the copy is cheaper than Python


class DirectLinears:
    """The linear layers of a model that write their weights' gradients to `places`, from `arm` on
    until `begin`. `close` leaves the model as it was."""

    def __init__(self, model: nn.Module, places: Mapping[Tensor, Tensor]):
        self._is_armed = False
        self._uses: dict[Tensor, int] = {}  # of each weight, in this piece
        self._layers: list[nn.Linear] = []
        for layer in _only_uses(model):
            place = places.get(layer.weight)
            if place is not None and place.numel() >= LEAST_ELEMENTS:
                self._layers.append(layer)
                layer.forward = self._forward_of(layer, place)  # type: ignore[assignment]

    def begin(self) -> None:
        """A piece begins that is not the last one."""
        self._is_armed = False

    def arm(self) -> None:
        """The last piece begins, whose gradients may be written."""
        self._is_armed = True
        self._uses = dict.fromkeys((layer.weight for layer in self._layers), 0)

    def close(self) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers = []

    def takes(self, weight: Tensor) -> bool:
        """Whether this backward may write, as far as is known by now."""
        return self._is_armed and self._uses.get(weight) == 1 and weight.grad is None

    def has_written(self, weight: Tensor) -> None:
        """Once a piece: who asked for this gradient by itself may still hold it."""
        self._uses[weight] += 1

    def _forward_of(self, layer: nn.Linear, place: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(own: nn.Linear, x: Tensor) -> Tensor:
            is_compiling = torch.compiler.is_compiling()  # first: what follows changes
            if is_compiling or not self._is_armed or _is_special(x, own):
                return linear(x, own.weight, own.bias)
            if own.weight not in self._uses:  # in its stead, for this call
                return linear(x, own.weight, own.bias)
            self._uses[own.weight] += 1
            args = (x, own.weight, own.bias, self, place)
            found: Tensor = _Linear.apply(*args)  # type: ignore[no-untyped-call]
            return found

        return MethodType(forward, layer)  # a deep copy of the layer computes with its own weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: Any, place: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by, ctx.place, ctx.weight = by, place, weight
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = rows.mm(weight).view(x.shape) if wants_x else None
        of_weight = None
        if wants_weight:
            inputs = x.reshape(-1, x.shape[-1])
            if not torch.is_grad_enabled() and ctx.by.takes(ctx.weight):
                ctx.by.has_written(ctx.weight)
                torch.mm(rows.t(), inputs, out=ctx.place)
                of_weight = ctx.place.detach()  # of its own, so that autograd takes it as it is
            else:
                of_weight = rows.t().mm(inputs)
        of_bias = rows.sum(0) if wants_bias else None
        return of_x, of_weight, of_bias, None, None


def _is_special(x: Any, layer: nn.Linear) -> bool:
    """Whether torch would do something else with it than multiply."""
    return (
        type(x) is not Tensor
        or x.dtype != layer.weight.dtype
        or x.dim() < 2
        or not x.numel()
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
    )


def _only_uses(model: nn.Module) -> Iterator[nn.Linear]:
    """Plain linear layers whose weight no other module has, and whose forward is torch's."""
    holders: dict[Tensor, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                holders[p] = holders.get(p, 0) + 1
    for module in model.modules():
        if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
            continue
        if "forward" not in vars(module) and holders.get(module.weight) == 1:
            yield module
