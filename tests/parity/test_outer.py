"""Local steps under an outer optimizer, packed, in fragments, through servers in lockstep: the bits
of one process that plays all replicas.

Codecs round, and rounding makes a whole step of a last bit; so nothing less than the same bits is
accepted, which both sides have since they add in one order.
"""

from pathlib import Path
from typing import Any

import pytest

from shoal.testing.ranks import Pool
from tests.parity.runs import check_same, train

ZOO = str(Path(__file__).parents[1] / "zoo.py")
UNLIKE = str(Path(__file__).with_name("unlike.py"))
# Each with a recipe and the steps, of which the last window is cut short.
QUICK = [
    ("data=2 local_steps=4 outer=nesterov", f"{ZOO}:mlp", 6),
    ("data=3 local_steps=4 outer=nesterov:0.5:0.8 codec=int8 fragments=2", f"{UNLIKE}:noisy", 11),
    ("data=4 local_steps=3 codec=int4", f"{UNLIKE}:frozen", 7),
    ("data=3 sync=server servers=2 local_steps=3 outer=nesterov:0.5:0.8", f"{UNLIKE}:noisy", 8),
    ("data=2 sync=server servers=2 local_steps=4 codec=int4", f"{UNLIKE}:frozen", 10),
    ("data=3 sync=server servers=2 local_steps=2 outer=nesterov codec=int8", f"{UNLIKE}:narrow", 7),
]
PLANS = [
    "data=2 local_steps=4 outer=nesterov",
    "data=2 local_steps=4 fragments=4",
    "data=4 local_steps=8 outer=nesterov codec=int8",
    "data=2 local_steps=6 outer=nesterov codec=int4 fragments=3",
    "data=4 local_steps=7 outer=nesterov codec=bf16 fragments=2 accumulate=2",
    "data=2 local_steps=4 outer=nesterov codec=fp16 precision=bf16",
    "data=1 local_steps=4 outer=nesterov:0.5",
    "data=2 sync=server local_steps=4",
    "data=4 sync=server servers=3 local_steps=8 outer=nesterov codec=int8",
    "data=4 sync=server servers=2 local_steps=7 outer=nesterov codec=bf16 accumulate=2",
    "data=2 sync=server local_steps=5 outer=nesterov codec=fp16 precision=bf16",
    "data=1 sync=server local_steps=4 outer=nesterov:0.5",
]
PACKED = [
    "data=3 local_steps=4 outer=nesterov codec=int4 fragments=2",
    "data=3 sync=server servers=2 local_steps=4 outer=nesterov codec=int8",
    "data=3 sync=server servers=2 local_steps=4 outer=nesterov",
]


@pytest.mark.parametrize(("plan", "recipe", "steps"), QUICK)
def test_replicas_train_what_the_reference_does(
    verify: Any, plan: str, recipe: str, steps: int
) -> None:
    check_same(verify(recipe, plan, steps=steps), steps)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", ["mlp", "cnn", "gpt"])
def test_many_steps(verify: Any, recipe: str, plan: str) -> None:
    steps = 18 if "server" in plan else 20
    check_same(verify(f"{ZOO}:{recipe}", plan, steps=steps), steps)


@pytest.mark.full
@pytest.mark.parametrize("plan", PACKED)
@pytest.mark.parametrize(
    "recipe", ["tied", "frozen", "unused", "double", "narrow", "groups", "recurrent"]
)
def test_models_unlike_one_another(verify: Any, recipe: str, plan: str) -> None:
    check_same(verify(f"{UNLIKE}:{recipe}", plan, steps=11), 11)


def test_packed_outer_gradients_send_less_and_end_alike(pool: Pool) -> None:
    plain = pool.run(train, 2, "network", "data=2 local_steps=4 outer=nesterov")
    first, second = pool.run(train, 2, "network", "data=2 local_steps=4 outer=nesterov codec=int4")
    assert all(tensor.equal(second["model"][name]) for name, tensor in first["model"].items())
    assert first["bytes"] < plain[0]["bytes"] / 2
