"""The norm of a gradient, in a form that any split of the parameters can compute alike.

Norms of fixed blocks of 1,024 elements, counted from each parameter's start, are taken first, and
their squares are added without rounding. So neither the order of the blocks matters nor who holds
them, and a sharded plan clips by the same number, bit for bit, as one process.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 1024


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all gradients; 0.0 when there are none."""
    return norm_of_blocks(block_norms(gradients))


def norm_of_blocks(norms: Tensor) -> float:
    """The norm of everything, from the norms of its blocks, in any order and with zeros between."""
    return math.sqrt(math.fsum(norms.double().square_().tolist()))


def coalesced(gradient: Tensor | None) -> Tensor | None:
    """A gradient that has each of its rows once, if it is sparse; any other as it is."""
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def values_of(gradient: Tensor) -> Tensor:
    """What a gradient is made of; of a sparse one that is coalesced, the rows that are not zero."""
    return gradient._values() if gradient.is_sparse else gradient


def num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def block_norms(gradients: Iterable[Tensor]) -> Tensor:
    """The norms of the blocks of all gradients; of sparse ones, of their rows."""
    parts: list[Tensor] = []
    for gradient in gradients:
        # Two bytes hold neither the digits of a norm nor its size.
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if gradient.is_sparse:
            rows = gradient.detach()._values().flatten(1)
            parts.append(torch.linalg.vector_norm(rows, dim=1, dtype=dtype))
            continue
        flat = gradient.detach().reshape(-1)
        whole = flat.numel() // BLOCK * BLOCK
        if whole:
            blocks = flat[:whole].view(-1, BLOCK)
            parts.append(torch.linalg.vector_norm(blocks, dim=1, dtype=dtype))
        if whole < flat.numel():
            parts.append(torch.linalg.vector_norm(flat[whole:], dtype=dtype).view(1))
    return torch.cat([part.float() for part in parts]) if parts else torch.zeros(0)


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply a gradient of this norm with so that it keeps the limit."""
    return min(1.0, limit / (norm + 1e-6))


def scale_all(gradients: Sequence[Tensor], scale: float, check: bool) -> bool:
    """Multiply all by `scale` in place; with `check`, say from the same pass if all are finite."""
    gradients = [values_of(g) for g in gradients]
    kinds = {(g.dtype, g.device) for g in gradients}
    for kind in kinds:
        alike = [g for g in gradients if (g.dtype, g.device) == kind]
        wide = kind[0] == torch.float64  # for which the checking kernel's factor is too short
        if check and not _finite(alike, 1.0 if wide else scale):
            return False
        if kind[0].itemsize == 2 and not check:  # a joint product would round the factor, too
            for gradient in alike:
                gradient.mul_(scale)
        elif wide or not check:
            torch._foreach_mul_(alike, scale)
    return True


def _finite(gradients: list[Tensor], scale: float) -> bool:
    """Scale in single precision and look for what is not finite."""
    device = gradients[0].device
    found, factor = torch.zeros(1, device=device), torch.tensor([scale], device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, factor)
    return not found.item()
