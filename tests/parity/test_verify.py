"""`shoal verify` catches bugs put into the product, and names where they first show."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

UNLIKE = str(Path(__file__).with_name("unlike.py"))


class Caught(NamedTuple):
    """A bug, where it is looked for, and the first difference that it must be found by."""

    bug: str
    recipe: str
    what: str
    name: str
    plan: str = "data=2 memory=apart"
    step: int = 1
    rank: int = 0


# The last bucket's and the first layer's parameters are named in the model's own order.
CAUGHT = [
    Caught("missing average", "unclipped", "gradient", "0.weight"),
    Caught("clip norm of one bucket", "plain", "gradient", "0.weight"),
    Caught("clip norm summed over ranks", "plain", "gradient", "0.weight"),
    Caught("clip before the exchange", "plain", "gradient", "0.weight"),
    Caught("seeds of the rank", "noisy", "loss", ""),
    Caught("buffers of one rank", "noisy", "buffer", "1.running_mean"),
    Caught("buffers stay local", "noisy", "buffer", "1.running_mean"),
    Caught("parameter left out", "unclipped", "gradient", "2.weight"),
    Caught("peer left out", "unclipped", "gradient", "0.weight", plan="data=2", rank=1),
    Caught("chunk stepped on twice", "unclipped", "weight", "2.weight", plan="data=2"),
    Caught("small gradient off", "faint", "gradient", "faint.bias"),
    Caught("small gradient missing", "faint", "gradient", "faint.bias"),
    Caught("sample lost", "plain", "loss", ""),
    Caught("mask as numbers", "attends", "loss", ""),
    Caught("weight as a mean", "weighted", "loss", ""),
    Caught(
        "last piece lost", "plain", "gradient", "0.weight", plan="data=2 accumulate=2 memory=apart"
    ),
    Caught("rate of the rank", "groups", "weight", "0.weight"),
    Caught("NaN on the way", "plain", "weight", "0.weight", step=2, rank=1),
    Caught("frozen weight drifts", "frozen", "weight", "0.weight", rank=1),
    Caught("loss of one rank", "plain", "loss", ""),
    Caught("first weights differ", "plain", "loss", ""),
    Caught(
        "loses what packing drops",
        "plain",
        "weight",
        "0.weight",
        plan="data=2 local_steps=2 codec=int4",
        step=4,
    ),
    Caught(
        "forgets to average", "plain", "weight", "0.weight", plan="data=2 local_steps=2", step=2
    ),
]
LONG = {
    "clip norm summed over ranks",
    "clip before the exchange",
    "buffers stay local",
    "rate of the rank",
    "last piece lost",
    "loss of one rank",
    "small gradient missing",
    "sample lost",
    "first weights differ",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.bug, marks=[pytest.mark.full] if case.bug in LONG else [])
        for case in CAUGHT
    ],
)
def test_a_bug_is_caught_and_named(verify: Any, case: Caught) -> None:
    found = verify(f"{UNLIKE}:{case.recipe}", case.plan, bug=case.bug)
    assert found.exit_code == 1, found.errors
    assert not found.verdict["passed"] and not found.verdict["identical"]
    assert found.verdict["verdict"] == "DIFFERENT"
    first = found.verdict["first"]
    place = (first["step"], first["rank"], first["what"], first["name"])
    assert place == (case.step, case.rank, case.what, case.name), found.errors
    assert f"DIFFERENT: first at step {case.step}" in found.errors
    if case.name:
        assert f"in module {case.name.rpartition('.')[0]}" in found.errors
    if case.bug == "NaN on the way":  # which ends the run; where it went astray is still told
        assert "the run failed: rank" in found.verdict["complaint"]
        assert "Replicas differ" in found.errors


@pytest.mark.parametrize(
    ("bug", "plan", "words"),
    [
        ("silence", "data=2 memory=apart", "at step 1 rank 0 sent 0 bytes"),
        ("talks all the time", "data=2 local_steps=3", "a step in which replicas work alone"),
    ],
)
def test_a_plan_that_does_not_do_what_it_says_is_refused(
    verify: Any, bug: str, plan: str, words: str
) -> None:
    found = verify(f"{UNLIKE}:plain", plan, bug=bug)
    assert found.exit_code == 1, found.errors
    assert words in found.verdict["complaint"]
    assert "NOT AS PLANNED" in found.errors
    assert found.verdict["verdict"] == "NOT AS PLANNED"


def test_a_model_that_magnifies_an_ulp_is_not_an_error(verify: Any) -> None:
    """Its gradients are off by a hundredth and more after a few steps, by rounding alone."""
    found = verify(f"{UNLIKE}:chaotic", "tensor=2")
    assert found.exit_code == 0, found.errors
    assert found.verdict["verdict"] == "WITHIN ROUNDING" and found.verdict["passed"]
    assert found.verdict["worst"]["gradient"] > 1e-2
    assert "WITHIN ROUNDING: no step, done from where the plan stood" in found.errors
    assert "in the weights makes" in found.errors


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        ("noisy", "data=2 memory=apart"),
        pytest.param("tied", "data=2 zero=2", marks=pytest.mark.full),
        pytest.param("noisy", "data=2 sync=server servers=2", marks=pytest.mark.full),
        ("groups", "data=2 local_steps=2 outer=nesterov codec=int8"),
        pytest.param("laid_out", "data=2 local_steps=2 sync=server", marks=pytest.mark.full),
        ("noisy", "data=2 sync=server servers=2 staleness=any"),
        pytest.param(
            "plain", "data=2 sync=server staleness=1 local_steps=2", marks=pytest.mark.full
        ),
    ],
)
def test_last_bits_are_rounding_under_any_plan(verify: Any, recipe: str, plan: str) -> None:
    found = verify(f"{UNLIKE}:{recipe}", plan, bug="last bits off", steps=6)
    assert found.exit_code == 0, found.errors
    assert found.verdict["verdict"] == "WITHIN ROUNDING" and found.verdict["num_steps"] == 6


@pytest.mark.full
def test_nan_in_the_last_step_ends_the_run_itself(verify: Any) -> None:
    """Apart, since both ranks may find it in weights that they share."""
    found = verify(f"{UNLIKE}:plain", "data=2 memory=apart", bug="NaN in the last step")
    assert found.exit_code == 1
    assert "rank 1 failed at step 5: Step 5 is not finite" in found.errors


def test_a_run_that_fails_everywhere_is_the_recipes_error(verify: Any) -> None:
    found = verify(f"{UNLIKE}:explodes", "data=2")
    assert found.exit_code == 1
    assert found.verdict["exit_code"] == 1 and "verdict" not in found.verdict
    assert "is not finite" in found.errors.splitlines()[-1]
