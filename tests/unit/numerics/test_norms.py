"""Norms in fixed blocks, clipping, and scaling that finds what is not finite."""

import math

import pytest
import torch

from shoal.numerics.norms import BLOCK, clip_factor, gradient_norm, scale_all


@pytest.mark.parametrize("lengths", [[1], [BLOCK], [BLOCK + 1, 3], [5 * BLOCK, 7, 2 * BLOCK - 1]])
def test_the_norm_is_the_norm(lengths: list[int]) -> None:
    gradients = [torch.randn(length) for length in lengths]
    assert gradient_norm(gradients) == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-6)


def test_no_gradient_has_no_norm() -> None:
    assert gradient_norm([]) == 0.0


def test_the_shape_does_not_matter() -> None:
    flat = torch.randn(3 * BLOCK)
    assert gradient_norm([flat.view(3, BLOCK)]) == gradient_norm([flat])


def test_clipping_keeps_the_limit_and_leaves_small_ones() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) * 4.0 == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaling_is_exact_in_the_gradients_own_precision(dtype: torch.dtype) -> None:
    gradient = torch.randn(9, dtype=dtype)
    expected = gradient * (1 / 3)
    assert scale_all([gradient], 1 / 3, check=True)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_is_found(bad: float, where: int) -> None:
    gradients = [torch.ones(3), torch.ones(4, dtype=torch.float64)]
    gradients[where][2] = bad
    assert not scale_all(gradients, 1.0, check=True)
    assert scale_all([], 2.0, check=True)
