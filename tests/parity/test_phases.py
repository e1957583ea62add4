"""Steps of a recipe's own: any plan that takes them trains what a plain loop with as many losses
and optimizers would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.data.batches import Batches
from shoal.numerics.randomness import derive_seed
from shoal.testing.ranks import Pool
from tests.parity import phased
from tests.parity.phased import misbehave, train

PHASED = str(Path(__file__).with_name("phased.py"))
GAN = str(Path(__file__).parents[2] / "examples" / "gan.py")


def unlike(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What has other bits in the two."""
    told = ("steps", "losses", "parts", "norms", "evaluation")
    model = theirs["model"]
    return [
        *(key for key in told if mine[key] != theirs[key]),
        *(name for name in model if not torch.equal(mine["model"][name], model[name])),
    ]


@pytest.mark.parametrize(
    ("recipe", "plan", "one"),
    [
        ("gan", "data=2", "pieces=2"),
        ("gan", "data=2 zero=1", "pieces=2"),
        ("clipped", "data=3 zero=1 pieces=6", "pieces=6"),
        ("bandit", "data=2 accumulate=2", "pieces=4"),
        ("bandit", "data=4 zero=2", "pieces=4"),
        ("whole", "data=2", "pieces=2"),
        pytest.param("clipped", "data=4 pieces=6", "pieces=6", marks=pytest.mark.full),
        pytest.param(
            "gan",
            "data=2 precision=bf16 recompute=blocks",
            "pieces=2 precision=bf16 recompute=blocks",
            marks=pytest.mark.full,
        ),
        pytest.param("bandit", "data=3 zero=1 pieces=6", "pieces=6", marks=pytest.mark.full),
    ],
)
def test_any_plan_gives_the_bits_of_one_rank(pool: Pool, recipe: str, plan: str, one: str) -> None:
    (alone,) = pool.run(train, 1, recipe, one)
    for rank in pool.run(train, int(plan[5]), recipe, plan):
        assert not unlike(rank, alone)
        assert rank["bytes"] > 0


def seeded(step: int, phase: int) -> None:
    torch.manual_seed(derive_seed(0, step, 0, phase))


def gan_by_hand(run: Any) -> tuple[nn.Module, list[dict[str, float]]]:
    """Two optimizers that take turns, without a line of Shoal's but for samples and seeds."""
    torch.manual_seed(run.seed)
    model = phased.GAN()
    by_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-2)
    by_discriminator = torch.optim.Adam(model.discriminator.parameters(), lr=5e-3)
    batches, told = Batches(run.data, batch_size=12, seed=run.seed, end="drop"), []
    for step in range(8):
        real = torch.stack([run.data[int(i)][0] for i in batches.at(step).ids])
        seeded(step, 0)
        loss = phased.discriminator_loss(model, real, real)["loss"]
        by_discriminator.zero_grad()
        loss.backward()
        by_discriminator.step()
        told.append({"discriminator": loss.item()})
        if step % 2 == 0 or loss.item() < 1.2:
            seeded(step, 1)
            loss = phased.generator_loss(model, real, real)
            by_generator.zero_grad()
            loss.backward()
            by_generator.step()
            told[-1]["generator"] = loss.item()
    return model, told


def test_one_rank_is_a_plain_loop_with_two_optimizers(pool: Pool) -> None:
    (trained,) = pool.run(train, 1, "gan", "pieces=1")
    model, told = gan_by_hand(phased.gan())
    for step, losses in enumerate(told):
        found = trained["parts"][step]
        assert {n: v for n, v in found.items() if "." not in n} == pytest.approx(losses, rel=1e-5)
        assert trained["losses"][step] == pytest.approx(sum(losses.values()), rel=1e-5)
        inner = found["discriminator.real"] + found["discriminator.drawn"]
        assert inner == pytest.approx(losses["discriminator"], rel=1e-5)
    assert 0 < sum("generator" in losses for losses in told) < len(told)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained["model"][name], tensor, rtol=1e-4, atol=1e-6)


def test_a_name_that_comes_twice_counts_by_its_mean(pool: Pool) -> None:
    (trained,) = pool.run(train, 1, "bandit", "")
    assert all(parts.keys() == {"value", "policy"} for parts in trained["parts"])
    assert trained["evaluation"].keys() == {"loss", "judged"}


@pytest.mark.parametrize(
    ("recipe", "plan", "verdict"),
    [
        ("gan", "data=2 zero=1", "SAME"),
        pytest.param("bandit", "data=3 pieces=6", "SAME", marks=pytest.mark.full),
        pytest.param("gan", "data=2 precision=bf16", "SAME", marks=pytest.mark.full),
        pytest.param("clipped", "data=2", "SAME", marks=pytest.mark.full),
        pytest.param("whole", "data=2 zero=2", "SAME", marks=pytest.mark.full),
        pytest.param("wasserstein", "data=2", "SAME", marks=pytest.mark.full),
        pytest.param("wasserstein", "data=2 offload=optimizer", "SAME", marks=pytest.mark.full),
        pytest.param("bandit", "data=3 sums=ring", "", marks=pytest.mark.full),
    ],
)
def test_verify(verify: Any, recipe: str, plan: str, verdict: str) -> None:
    found = verify(f"{PHASED}:{recipe}", plan)
    assert found.exit_code == 0 and found.verdict["num_steps"] == 5, found.errors
    assert found.verdict["verdict"] == verdict or not verdict


@pytest.mark.parametrize(
    "recipe",
    [
        "gan",
        pytest.param("bandit", marks=pytest.mark.full),
        pytest.param("wasserstein", marks=pytest.mark.full),
    ],
)
def test_rounding_is_no_error(verify: Any, recipe: str) -> None:
    found = verify(f"{PHASED}:{recipe}", "data=2", bug="last bits off")
    assert found.exit_code == 0, found.errors
    assert found.verdict["verdict"] == "WITHIN ROUNDING"


@pytest.mark.parametrize(
    ("bug", "what", "name"),
    [
        ("second phase lost", "weight", "generator.0.weight"),
        pytest.param("draws of the first phase", "loss", "", marks=pytest.mark.full),
        pytest.param(
            "missing average", "gradient", "discriminator.0.weight", marks=pytest.mark.full
        ),
    ],
)
def test_verify_finds_a_bug(verify: Any, bug: str, what: str, name: str) -> None:
    found = verify(f"{PHASED}:gan", "data=2", bug=bug)
    assert found.exit_code == 1, found.errors
    first = found.verdict["first"]
    assert (first["step"], first["what"], first["name"]) == (1, what, name)


@pytest.mark.parametrize(
    ("how", "num_ranks", "said"),
    [
        ("silent", 2, "RecipeError: Step 1 ended without a call of batch.minimize"),
        ("unlike order", 2, "PhasesDiverged: Ranks do unlike things: what comes next is phase 1, "),
        ("one more", 3, "phase 2, generator of generator (of step 3) on rank 1 and the end of the"),
        ("one more at the end", 2, "PhasesDiverged: Ranks do unlike things"),
        ("caught", 2, "ZeroDivisionError"),
        ("detached", 2, "does not depend on a parameter of 'generator'"),
        ("misspelt", 2, "no optimizer has this name. Did you mean 'discriminator'?"),
    ],
)
def test_what_a_step_must_not_do_is_said_on_every_rank(
    pool: Pool, how: str, num_ranks: int, said: str
) -> None:
    for told in pool.run(misbehave, num_ranks, how):
        assert said in told


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("data=2", marks=pytest.mark.full),
        pytest.param("data=2 zero=1 precision=bf16", marks=pytest.mark.full),
    ],
)
def test_the_example(verify: Any, plan: str) -> None:
    found = verify(f"{GAN}:small", plan, steps=4)
    assert found.exit_code == 0 and found.verdict["verdict"] == "SAME", found.errors
