"""Row-wise Adagrad: one number of state for each row of a table, and steps on touched rows only.

The mean square of a row's gradient is added to its number, and the row moves by its gradient over
the root of that. So rows that are seldom looked up keep large steps, at a 64th of Adagrad's memory
for rows of 64. When not to use it: for matrices whose rows mean nothing of their own.

Cost: of a step the touched rows. Known from embeddings of recommenders; Duchi et al. 2011.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import UsageError


class RowwiseAdagrad(Optimizer):
    """For parameters of two dimensions or more, with sparse gradients or dense ones."""

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10):
        if not lr >= 0.0 or not eps > 0.0:
            raise UsageError(
                f"RowwiseAdagrad was given lr={lr} and eps={eps}. A rate is not negative, and eps "
                "is above 0."
            )
        super().__init__(params, {"lr": lr, "eps": eps})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() < 2:
                raise UsageError(
                    f"RowwiseAdagrad was given a parameter of shape {tuple(p.shape)}, which has no "
                    "rows. Give it tables, and the others to another optimizer: "
                    "shoal.Optimizers(AdamW(others), RowwiseAdagrad(tables))."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p]["sum"] = p.new_zeros((len(p), *[1] * (p.dim() - 1)))
                    _step(p, p.grad, self.state[p]["sum"], float(group["lr"]), group["eps"])


def _step(p: Tensor, gradient: Tensor, sums: Tensor, rate: float, eps: float) -> None:
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        places, rows = gradient._indices()[0], gradient._values()
    else:
        places, rows = torch.arange(len(p), device=p.device), gradient
    squares = rows.square().flatten(1).mean(1).view(-1, *[1] * (p.dim() - 1))
    grown = sums.index_select(0, places) + squares
    sums.index_copy_(0, places, grown)
    p.index_add_(0, places, rows / grown.sqrt().add_(eps) * -rate)
