"""Optimizers for tables: row-wise Adagrad, and several optimizers as one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.numerics.optimizers import is_element_wise, kind_of, use_fused_kernels


def table(rows: int = 20, width: int = 5) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, width, generator=torch.Generator().manual_seed(1)))


def by_hand(p: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """The formula, row by row, in double precision."""
    p, sums = p.detach().double().clone(), torch.zeros(len(p), dtype=torch.float64)
    for gradient in gradients:
        for row in range(len(p)):
            g = gradient[row].double()
            sums[row] += g.square().mean()
            if sums[row]:
                p[row] -= rate * g / (sums[row].sqrt() + 1e-10)
    return p


@pytest.mark.parametrize("sparse", [True, False])
def test_row_wise_adagrad_is_its_formula(sparse: bool) -> None:
    torch.manual_seed(2)
    own = table()
    gradients = [torch.randn(20, 5) * (torch.rand(20, 1) < 0.4) for _ in range(6)]
    wanted = by_hand(own, gradients, 0.1)
    optimizer = shoal.RowwiseAdagrad([own], lr=0.1)
    for gradient in gradients:
        own.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()
    torch.testing.assert_close(own.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    assert optimizer.state[own]["sum"].shape == (20, 1)


def test_a_part_of_the_rows_is_stepped_on_as_in_the_whole() -> None:
    """A server's rows move by the same bits."""
    torch.manual_seed(2)
    whole = table(200, 64)
    part = nn.Parameter(whole.detach()[40:47].clone())
    optimizers = [shoal.RowwiseAdagrad([p], lr=0.1) for p in (whole, part)]
    for _ in range(3):
        gradient = torch.randn(200, 64)
        whole.grad, part.grad = gradient.to_sparse(1), gradient[40:47].to_sparse(1)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole[40:47], part)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"lr": float("nan")}, {"eps": 0.0}])
def test_rates_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="RowwiseAdagrad was given"):
        shoal.RowwiseAdagrad([table()], **wrong)


def test_a_parameter_without_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="has no rows"):
        shoal.RowwiseAdagrad([nn.Parameter(torch.zeros(3))])


def test_several_optimizers_step_as_each_would() -> None:
    alone = [table(3, 3), table(4, 4)]
    kinds = [lambda p: torch.optim.AdamW([p], lr=0.1), lambda p: torch.optim.SGD([p], lr=0.2)]
    together = copy.deepcopy(alone)
    apart = [kind(p) for kind, p in zip(kinds, alone, strict=True)]
    both = shoal.Optimizers(*(kind(p) for kind, p in zip(kinds, together, strict=True)))
    for _ in range(4):
        for p, q in zip(alone, together, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in apart:
            optimizer.step()
        both.step()
        both.load_state_dict(copy.deepcopy(both.state_dict()))  # as torch keeps it
    assert all(torch.equal(p, q) for p, q in zip(alone, together, strict=True))
    assert len(both.param_groups) == 2 and len(both.state) == 1
    assert kind_of(both) == "Optimizers(AdamW, SGD)"


def test_what_is_said_of_several_is_said_of_each() -> None:
    layers, rows = table(), table()
    both = shoal.Optimizers(torch.optim.AdamW([layers]), shoal.RowwiseAdagrad([rows]))
    assert not is_element_wise(both) and is_element_wise(both, {rows})
    use_fused_kernels(both, {rows})
    assert both.param_groups[0]["fused"] is True and "fused" not in both.param_groups[1]


def test_nothing_is_no_optimizer() -> None:
    with pytest.raises(UsageError, match="wants torch optimizers"):
        shoal.Optimizers()
