"""A plan that did not do what it says is found out by what its ranks hold, step on and send."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import nn

from shoal.parallel.layout import Slice
from shoal.plans.plan import Plan
from shoal.training.run import resolve
from shoal.verify.compare import StepComparison, StepRecord, VerifyResult, name_slices
from shoal.verify.plan_checks import (
    describe_uncut,
    find_violation,
    held_share,
    is_excused,
    uncut_parameters,
)
from shoal.verify.reference import ReplicaState
from tests import zoo

MATRICES = {f"layers.{i}.weight": (100, 100) for i in range(10)}
ATTENTION = {f"layers.{i}.attn.weight": (100, 100) for i in range(10)}
TOTAL = 100_000


class Rank(NamedTuple):
    """What a rank would tell."""

    held: int = TOTAL
    num_stepped: int = TOTAL
    bytes_sent: int = 1

    def num_held(self, names: Sequence[str]) -> int:
        return self.held


HALF = TOTAL // 2
KEPT = {
    "data=2": [Rank(), Rank()],
    "data=2 zero=1": [Rank(num_stepped=HALF), Rank(num_stepped=HALF)],
    "data=2 zero=3": [Rank(HALF, HALF), Rank(HALF, HALF)],
    "data=1 tensor=2": [Rank(HALF, HALF), Rank(HALF, HALF)],
    "data=1 pipeline=2": [Rank(TOTAL - 1, TOTAL - 1), Rank(1, 1)],
    "data=1": [Rank(bytes_sent=0)],
}


@pytest.mark.parametrize("plan", KEPT)
def test_a_kept_promise_is_silent(plan: str) -> None:
    assert find_violation(Plan.parse(plan), KEPT[plan], MATRICES, speaks=True) == ""


@pytest.mark.parametrize(
    ("plan", "lie", "words"),
    [
        ("data=2", Rank(bytes_sent=0), "rank 1 sent 0 bytes in a step in which replicas agree"),
        ("data=2 zero=1", Rank(), f"rank 1 steps on {TOTAL} of {TOTAL} parameters, where zero=1"),
        ("data=2 zero=3", Rank(HALF, TOTAL), f"rank 1 steps on {TOTAL} of {TOTAL}"),
        ("data=1 tensor=2", Rank(), f"rank 1 holds all {TOTAL} parameters, so tensor=2 cut"),
        ("data=1 pipeline=2", Rank(0, 0), f"rank 1 of a pipeline holds 0 of {TOTAL} parameters"),
        ("data=1 pipeline=2", Rank(), f"rank 1 of a pipeline holds {TOTAL} of {TOTAL}"),
    ],
)
def test_a_lie_is_told(plan: str, lie: Rank, words: str) -> None:
    told = [KEPT[plan][0], lie]
    assert find_violation(Plan.parse(plan), told, MATRICES, speaks=True).startswith(words)


def test_replicas_that_work_alone_are_silent() -> None:
    plan = Plan.parse("data=2 local_steps=2")
    quiet = [Rank(bytes_sent=0)] * 2
    assert find_violation(plan, quiet, MATRICES, speaks=False) == ""
    assert "work alone" in find_violation(plan, [Rank()] * 2, MATRICES, speaks=False)
    for told in (quiet, [Rank()] * 2):
        assert find_violation(plan, told, MATRICES, speaks=None) == "", "that depends on sizes"


def test_attention_must_be_cut() -> None:
    plan = Plan.parse("data=1 tensor=2")
    assert find_violation(plan, [Rank(60_000)] * 2, ATTENTION, speaks=True) == ""
    words = find_violation(plan, [Rank(60_001)] * 2, ATTENTION, speaks=True)
    assert words.endswith("where tensor=2 of a model with attention allows 60000")
    assert find_violation(plan, [Rank(99_999)] * 2, MATRICES, speaks=True) == ""


def test_what_is_excused_may_stay_whole() -> None:
    plan = Plan.parse("data=1 tensor=2")
    whole = dict.fromkeys(list(ATTENTION)[:5], "a norm is taken over the dim that is cut")
    assert find_violation(plan, [Rank(85_000)] * 2, ATTENTION, speaks=True, whole=whole) == ""
    words = find_violation(plan, [Rank(85_001)] * 2, ATTENTION, speaks=True, whole=whole)
    assert words.endswith("allows 85000")
    whole = dict.fromkeys(whole, "sort has no rule for parts")
    words = find_violation(plan, [Rank(85_000)] * 2, ATTENTION, speaks=True, whole=whole)
    assert words.endswith("allows 60000")


def test_what_is_excused_is_said() -> None:
    plan = Plan.parse("data=1 tensor=2")
    whole = dict.fromkeys(list(MATRICES)[:8], "its result meets a whole activation (a residual)")
    words = describe_uncut(
        plan, MATRICES, whole | {"layers.9.weight": "2 ranks do not divide 7 columns"}
    )
    assert words == (
        "tensor=2 leaves 90% of the parameters whole on every rank (80% layers.*.weight: its "
        "result meets a whole activation (a residual); 10% layers.*.weight: 2 ranks do not divide "
        "7 columns). shoal explain lists all"
    )
    assert describe_uncut(plan, MATRICES, dict.fromkeys(list(MATRICES)[:1], "it is small")) == ""
    assert describe_uncut(plan, MATRICES, {}) == ""


def test_a_projection_alone_is_no_attention() -> None:
    plan, shapes = Plan.parse("data=1 tensor=2"), {"mixer.in_proj.weight": (1_000, 100)}
    assert find_violation(plan, [Rank(99_999)] * 2, shapes, speaks=True) == ""


def test_what_is_overridden_is_excused_and_what_has_no_rule_is_not() -> None:
    class Odd(nn.Module):
        """Between two of its matrices stands a function that no rule knows."""

        def __init__(self) -> None:
            super().__init__()
            self.attn, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
            self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, zoo.KINDS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attn(x)
            named: torch.Tensor = self.mlp(self.out(x * x.count_nonzero()))
            return named

    run = dataclasses.replace(zoo.mlp(), model=Odd, cuts={"out": "whole"})
    whole = uncut_parameters(run, resolve(run, "tensor=2", None))
    assert is_excused(whole["out.weight"]) and not is_excused(whole["attn.weight"])
    assert uncut_parameters(run, resolve(run, "data=2", None)) == {}


def test_the_share_is_of_the_rank_that_holds_the_most() -> None:
    assert held_share([Rank(HALF), Rank(TOTAL // 4)], MATRICES) == 0.5


def told(weight: torch.Tensor, rows: slice) -> StepRecord:
    """A rank that holds some rows of the only weight."""
    place = f"{rows.start},0"
    return StepRecord(
        {
            "loss": torch.zeros(1, dtype=torch.float64),
            "bytes_sent": torch.tensor([1]),
            "stepped": torch.tensor([1]),
            f"held/w/{place}": weight[rows].clone(),
            f"gradient/w/{place}": weight[rows].clone(),
        }
    )


def test_names_may_have_slashes() -> None:
    part = Slice(torch.ones(2, 3), (3, 3), (1, 0))
    content = name_slices("held", {"dense/kernel": [part], "a/b/c": [part]})
    common = {name: torch.zeros(1) for name in ("loss", "bytes_sent", "stepped")}
    step = StepRecord({**common, **content})
    assert step.num_held(["dense/kernel"]) == step.num_held(["a/b/c"]) == 6
    (block, _), *none = step.parts("held", "a/b/c")
    assert block.offset == (1, 0) and not none


@pytest.mark.parametrize(("last", "complaint"), [(4, ""), (3, "no rank holds all of the gradient")])
def test_a_part_that_no_rank_holds_is_missed(last: int, complaint: str) -> None:
    weight = torch.randn(4, 3)
    own = ReplicaState(loss=0.0, gradients={"w": weight}, weights={"w": weight}, buffers={})
    verdict = VerifyResult()
    ranks = {0: told(weight, slice(0, 2)), 1: told(weight, slice(2, last))}
    StepComparison(verdict, Plan.parse("data=1 tensor=2"), 1, ranks).whole(own)
    assert complaint in verdict.complaint and bool(verdict.complaint) == bool(complaint)
    assert verdict.first is None, "what is held is right"


def test_zero_3_must_share_out_parameters_unless_they_are_idle() -> None:
    plan, shapes = Plan.parse("data=2 zero=3"), {f"p{i}": (1_000, 10) for i in range(10)}
    told = [Rank(100_000, 50_000)] * 2
    assert "in spite of zero=3" in find_violation(plan, told, shapes, speaks=True)
    assert find_violation(plan, [Rank(50_000, 50_000)] * 2, shapes, speaks=True) == ""
    idle = [f"p{i}" for i in range(5)]
    assert find_violation(plan, [Rank(75_000, 25_000)] * 2, shapes, speaks=True, idle=idle) == ""
