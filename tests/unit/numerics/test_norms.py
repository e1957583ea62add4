"""Norms in fixed blocks, clipping, and scaling that finds what is not finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.numerics.norms import (
    BLOCK,
    block_norms,
    clip_factor,
    gradient_norm,
    norm_of_blocks,
    num_blocks,
    scale_all,
)


@pytest.mark.parametrize("lengths", [[1], [BLOCK], [BLOCK + 1, 3], [5 * BLOCK, 7, 2 * BLOCK - 1]])
def test_the_norm_is_the_norm(lengths: list[int]) -> None:
    gradients = [torch.randn(length) for length in lengths]
    assert gradient_norm(gradients) == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, 6e4])
def test_the_norm_of_narrow_gradients_is_not_as_narrow(dtype: torch.dtype, value: float) -> None:
    """Of bf16 a norm would have two digits, and of fp16 it would be infinite."""
    dense = torch.linspace(-value, value, 2 * BLOCK + 5).to(dtype)
    rows = torch.sparse_coo_tensor(
        torch.tensor([[1, 4]]), dense[:64].view(2, 32), (6, 32), check_invariants=False
    )
    for gradient, values in ((dense, dense), (rows.coalesce(), dense[:64])):
        norm = values.double().norm().item()
        assert gradient_norm([gradient]) == pytest.approx(norm, rel=1e-6)


def test_no_gradient_has_no_norm() -> None:
    assert gradient_norm([]) == 0.0


def test_the_shape_does_not_matter() -> None:
    flat = torch.randn(3 * BLOCK)
    assert gradient_norm([flat.view(3, BLOCK)]) == gradient_norm([flat])


@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=5), st.randoms())
def test_neither_order_nor_zeros_matter(lengths: list[int], chance) -> None:
    """So ranks may send the norms of their own blocks in any order, with gaps between."""
    generator = torch.Generator().manual_seed(sum(lengths))
    gradients = [torch.randn(length, generator=generator) for length in lengths]
    norms = block_norms(gradients)
    assert norms.numel() == sum(map(num_blocks, lengths))
    order = list(range(norms.numel()))
    chance.shuffle(order)
    gaps = torch.zeros(3 * norms.numel())
    gaps[1::3] = norms[order]
    assert norm_of_blocks(gaps) == norm_of_blocks(norms) == gradient_norm(gradients)


def test_cutting_at_blocks_does_not_matter() -> None:
    gradient = torch.randn(5 * BLOCK + 17)
    parts = [gradient[3 * BLOCK :], gradient[:BLOCK], gradient[BLOCK : 3 * BLOCK]]
    assert gradient_norm(parts) == gradient_norm([gradient])


def test_clipping_keeps_the_limit_and_leaves_small_ones() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) * 4.0 == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scaling_is_exact_in_the_gradients_own_precision(dtype: torch.dtype, check: bool) -> None:
    """The factor is not rounded to it, where that is narrower."""
    gradient = torch.linspace(-3, 3, 900, dtype=dtype)
    expected = (gradient.double() * (1 / 3)).to(dtype)
    assert scale_all([gradient], 1 / 3, check)
    torch.testing.assert_close(gradient, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert float((gradient != expected).float().mean()) < (0.01 if dtype.itemsize == 2 else 1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_is_found(bad: float, where: int) -> None:
    gradients = [torch.ones(3), torch.ones(4, dtype=torch.float64)]
    gradients[where][2] = bad
    assert not scale_all(gradients, 1.0, check=True)
    assert scale_all([], 2.0, check=True)
