"""The norm of a gradient, in a form that any split of the parameters can compute alike.

Norms of fixed blocks of 1,024 elements, counted from each parameter's start, are taken first and
then the norm of those. Whoever holds some of the blocks can contribute them, so a sharded plan
clips by the same number, bit for bit, as one process.
"""

from collections.abc import Iterable, Sequence

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
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    finite = True
    for (dtype, device), alike in by_kind.items():
        found = torch.zeros(1, device=device)
        wide = dtype == torch.float64  # the kernel's factor is single precision
        factor = torch.tensor([1.0 if wide else scale], device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, found, factor)
        if wide:
            torch._foreach_mul_(alike, scale)
        finite = finite and not found.item()
    return finite
