"""PowerSGD: a matrix as the product of two thin ones, by one step of a power iteration. Pure.

Of a gradient M, as a matrix of its first dim and the others, P = M Q is summed over replicas and
made orthonormal, then Q = M' P is summed, and the sum of the gradients is nearly P Q'. Both sums
are linear, so nothing is decoded on the way, and Q, which all hold alike, is where the next step
begins: over steps that iterates towards the largest singular vectors. Each replica keeps what its
own M lacks of its share. Vogels et al. 2019, arXiv 1905.13727.

Cost: R (rows + columns) elements for a rank of R, twice on the way as in any all-reduce; two thin
products of matrices, and a QR decomposition of rows x R. Not for vectors, which stay as they are.
"""

import torch
from torch import Tensor


def first_factor(shape: tuple[int, ...], rank: int) -> Tensor:
    """Where the iteration begins for a matrix of this shape, the same everywhere."""
    rows, columns = matrix_shape(shape)
    draws = torch.Generator().manual_seed(rows * 1_000_003 + columns)
    return torch.randn(columns, min(rank, rows, columns), generator=draws)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], torch.Size(shape[1:]).numel()


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns span; NaN if one is not finite."""
    if not bool(columns.isfinite().all()):
        return torch.full_like(columns, torch.nan)
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis
