"""The norm of a gradient, in a form that any split of the parameters can compute alike.

Norms of fixed blocks of 1,024 elements, counted from each parameter's start, are taken first and
then the norm of those. Whoever holds some of the blocks can contribute them, so a sharded plan
clips by the same number, bit for bit, as one process.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 1024


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all gradients; 0.0 when there are none."""
    parts: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        whole = flat.numel() // BLOCK * BLOCK
        if whole:
            parts.append(torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1))
        if whole < flat.numel():
            parts.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    if not parts:
        return 0.0
    return float(torch.linalg.vector_norm(torch.cat([part.float() for part in parts])))


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply a gradient of this norm with so that it keeps the limit."""
    return min(1.0, limit / (norm + 1e-6))


def scale_if_finite(gradients: Sequence[Tensor], scale: float) -> bool:
    """Multiply all by `scale` in place, in one pass that also finds what is not finite."""
    alike = gradients
    while alike:
        first = alike[0]
        kind = first.dtype, first.device
        here = [g for g in alike if (g.dtype, g.device) == kind]
        if not _scale_alike(here, scale):
            return False
        alike = [g for g in alike if (g.dtype, g.device) != kind]
    return True


def _scale_alike(gradients: list[Tensor], scale: float) -> bool:
    device = gradients[0].device
    if gradients[0].dtype != torch.float64:
        found = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, _number(scale, device))
        return not found.item()
    # The kernel's factor is single precision, too short for these.
    torch._foreach_mul_(gradients, scale)
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@lru_cache(maxsize=64)
def _number(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], device=device)
