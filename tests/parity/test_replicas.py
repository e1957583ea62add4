"""Replicas that are meshes: each trains in lockstep, and all agree once in some steps. They train
what one process does that plays each replica in turn.

Where the ranks of a replica add up in the order of one process, so do peers, and bits are the same.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.runs import check_same

ZOO = str(Path(__file__).parents[1] / "zoo.py")
UNLIKE = str(Path(__file__).with_name("unlike.py"))
# Each with the recipe that meets it in the quick suite.
SAME = {
    "data=4 replicas=2 local_steps=3 outer=nesterov:0.5:0.8 codec=int8": f"{UNLIKE}:noisy",
    "data=2 pipeline=2 local_steps=3 outer=nesterov codec=int8": f"{ZOO}:lstm",
    "data=4 zero=1 replicas=2 local_steps=2 outer=nesterov": f"{UNLIKE}:tied",
    "data=2 local_steps=3 precision=fp16": f"{UNLIKE}:loud",
    "data=4 zero=2 replicas=2 sync=server local_steps=3 outer=nesterov": f"{UNLIKE}:noisy",
    "data=2 pipeline=2 sync=server servers=4 local_steps=3 codec=int4": f"{ZOO}:mlp",
    "data=2 pipeline=2 local_steps=4 outer=nesterov fragments=3": f"{ZOO}:lstm",
    "data=2 pipeline=2 local_steps=4 outer=nesterov fragments=2 codec=int8": f"{ZOO}:mlp",
}
WITHIN_ROUNDING = {
    "data=2 tensor=2 local_steps=3 outer=nesterov": f"{ZOO}:gpt",
    "data=4 zero=3 replicas=2 local_steps=3": f"{ZOO}:mlp",
    "data=2 tensor=2 sync=server servers=4 local_steps=2 outer=nesterov": f"{ZOO}:mlp",
    "data=2 tensor=2 local_steps=4 outer=nesterov fragments=2": f"{ZOO}:gpt",
    "data=4 zero=3 replicas=2 local_steps=4 outer=nesterov fragments=2": f"{ZOO}:mlp",
}
# What is said of models that a plan cannot cut.
UNCUT = ("can cut nothing of this model", "cannot be cut into", "cannot shard this model")
PLANS = [
    *SAME,
    *WITHIN_ROUNDING,
    "data=2 pipeline=2 sync=server servers=2 local_steps=3",
    "data=4 replicas=2 local_steps=4",
    "data=4 pieces=8 zero=1 replicas=2 local_steps=4 precision=fp16",
    "data=4 zero=2 replicas=2 local_steps=4 outer=nesterov",
    "data=2 tensor=2 local_steps=3",
    "data=1 tensor=2 local_steps=4 outer=nesterov:0.5",
    "data=2 pipeline=2 schedule=zbv local_steps=4 outer=nesterov",
    "data=4 zero=3 replicas=2 local_steps=3 outer=nesterov",
]


@pytest.mark.parametrize(("plan", "recipe"), SAME.items())
def test_replicas_have_the_bits_of_one_process(verify: Any, plan: str, recipe: str) -> None:
    check_same(verify(recipe, plan, steps=8), 8)


@pytest.mark.parametrize(("plan", "recipe"), WITHIN_ROUNDING.items())
def test_replicas_whose_ranks_share_sums(verify: Any, plan: str, recipe: str) -> None:
    passes(verify(recipe, plan, steps=8), 8)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt", "lstm", "bert", "moe"])
def test_many_models(verify: Any, model: str, plan: str) -> None:
    if "fp16" in plan and model in ("lstm", "moe"):  # of which torch has no kernels in fp16
        return
    found = verify(f"{ZOO}:{model}", plan, steps=14)
    if not (found.exit_code == 2 and "stages on several ranks share" in found.errors):
        passes(found, 14)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", ["tied", "frozen", "unused", "double", "groups", "noisy"])
def test_models_unlike_one_another(verify: Any, recipe: str, plan: str) -> None:
    plan = plan.replace("pipeline=2", "pipeline=2 microbatches=3")  # whose batches are of twelve
    plan = plan.replace("pieces=8", "pieces=4")
    found = verify(f"{UNLIKE}:{recipe}", plan, steps=11)
    if not (found.exit_code == 2 and any(words in found.errors for words in UNCUT)):
        passes(found, 11)


def passes(found: Any, steps: int) -> None:
    assert found.exit_code == 0, found.errors
    assert found.verdict["passed"] and found.verdict["num_steps"] == steps
