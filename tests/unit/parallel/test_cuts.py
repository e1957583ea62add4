"""Where a model is cut whose modules are used again and again: no rank may hold all of it."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.pipeline.cuts import split_stages
from shoal.parallel.pipeline.stages import rank_of_stage
from tests.unit.parallel.test_stages import WIDTH, Layers, compare, examples, plan_for, squares


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Again(nn.Module):
    """One layer three times, then another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.layer(self.layer(x))))
        return out


class Between(Again):
    """The layer before and after the other one."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.head(self.layer(x)))
        return out


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x))
        return out


class Much(Layers):
    """Cut where it is used again: the rest of the model is on one stage only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for _ in range(4):
            x = self.b(x).tanh()
        out: Tensor = self.d(self.c(x))
        return out


def test_a_layer_that_is_used_again_stays_on_one_stage_if_need_be() -> None:
    plan = compare(Again(), examples(2), 2, squares)
    assert [set(stage.parameters) for stage in plan.stages] == [
        {"layer.weight", "layer.bias"},
        {"head.weight", "head.bias"},
    ]
    held = [set(stage.parameters) for stage in compare(Much(), examples(2), 2, squares).stages]
    assert "b.weight" in held[0] & held[1]  # which is no harm: neither holds all


@pytest.mark.parametrize(("kind", "num_stages"), [(Alone, 2), (Between, 2), (Again, 3)])
def test_a_rank_that_would_hold_all_is_refused_beforehand(
    kind: Callable[[], nn.Module], num_stages: int
) -> None:
    with pytest.raises(PlanError, match=r"so that no rank holds all of its parameters\. It uses l"):
        plan_for(kind(), examples(2), num_stages)


def test_the_stages_of_a_rank_are_looked_at_together() -> None:
    """Two ranks with two stages each: there and back, the first would hold both ends."""
    model = nn.Sequential(*(linear() for _ in range(4)))
    plan = plan_for(model, examples(2), 4)
    for schedule in ("interleaved", "zbv"):
        found = split_stages(plan.tape, 4, lambda stage, of=schedule: rank_of_stage(stage, 2, of))
        assert [stage.start for stage in found.stages] == [0, 1, 2, 3]
    with pytest.raises(PlanError, match="no rank holds all"):
        split_stages(plan.tape, 4, lambda stage: 0)
