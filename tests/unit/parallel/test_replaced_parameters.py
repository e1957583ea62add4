"""Who holds a parameter that a part took the place of is told so."""

import pytest
import torch
from torch import nn

from shoal.errors import PlanError
from shoal.parallel.replaced_parameters import retire_replaced
from shoal.plans.plan import Plan


def test_an_old_parameter_raises_and_others_do_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = dict(model.named_parameters())
    model[0].weight = nn.Parameter(torch.ones(1, 2))
    retire_replaced(model, before, Plan.parse("tensor=2"))
    old = before["0.weight"]
    assert old.shape == (2, 2) and old.dtype == torch.float32  # its form is not used
    with pytest.raises(PlanError, match=r"uses its parameter 0\.weight in another way.*tensor=2"):
        torch.ones(1, 2) @ old
    with pytest.raises(PlanError, match=r"0\.weight"):
        nn.functional.linear(torch.ones(1, 2), weight=old)
    assert type(before["1.weight"]) is nn.Parameter
    assert model[1](torch.ones(1, 2)).shape == (1, 2)
