"""What a step function sees: phases by name, answers of phases that were made, and errors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import RecipeError
from shoal.training.custom_step import (
    Phase,
    StepBatch,
    losses_of,
    norm_of,
    parts_of,
    refuse_independent,
    total_of,
)
from shoal.training.progress import PhaseResult

KNOWN = ("generator", "discriminator")


def some_loss(model: Any, inputs: Any, target: Any) -> Any:
    return None


def batch_of(made: list[PhaseResult], phases: list[Phase], known: Any = KNOWN) -> StepBatch:
    """One that notes the phases that are to be made, and answers with their numbers."""

    def make(phase: Phase) -> float:
        phases.append(phase)
        return float(phase.number)

    return StepBatch(4, known, made, make)


def test_phases_have_names_and_numbers() -> None:
    phases: list[Phase] = []
    batch = batch_of([], phases)
    answers = [
        batch.minimize(some_loss),
        batch.minimize(some_loss, of="generator"),
        batch.minimize(some_loss, of=["generator", "discriminator"]),
        batch.minimize(some_loss, of="generator", name="again"),
        batch.minimize(lambda *given: None),
    ]
    batch.end()
    assert batch.step == 4 and answers == [0.0, 1.0, 2.0, 3.0, 4.0]
    names = ["some_loss", "generator", "generator+discriminator", "again", "loss"]
    assert [phase.name for phase in phases] == names
    assert [phase.of for phase in phases][:3] == [(), ("generator",), KNOWN]
    assert str(phases[1]) == "phase 2, generator of generator"


def test_phases_that_were_made_answer_again_and_the_others_follow() -> None:
    phases: list[Phase] = []
    batch = batch_of([PhaseResult("generator", 0.25), PhaseResult("again", 0.5)], phases)
    assert batch.minimize(some_loss, of="generator") == 0.25
    assert batch.minimize(some_loss, of="generator", name="again") == 0.5
    assert not phases
    assert batch.minimize(some_loss, of="discriminator") == 2.0
    batch.end()
    assert [phase.name for phase in phases] == ["discriminator"]


def test_a_step_that_does_otherwise_when_done_again_is_refused() -> None:
    batch = batch_of([PhaseResult("generator", 0.25)], [])
    with pytest.raises(RecipeError, match="is 'discriminator' now and was 'generator'"):
        batch.minimize(some_loss, of="discriminator")
    batch = batch_of([PhaseResult("generator", 0.25)], [])
    with pytest.raises(RecipeError, match="ends without its phase 1, which was 'generator'"):
        batch.end()


def test_a_step_without_a_phase_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"Step 5 ended without a call of batch\.minimize"):
        batch_of([], []).end()


@pytest.mark.parametrize(
    ("given", "known", "said"),
    [
        ({"of": "generatr"}, KNOWN, "no optimizer has this name. Did you mean 'generator'?"),
        ({"of": "x"}, KNOWN, "Known: discriminator, generator."),
        ({"of": "x"}, (), "have no names. Let Run.optimizer return shoal.Optimizers.x=..., ...."),
        ({"name": ""}, KNOWN, "the name of a phase is text"),
        ({"name": 3}, KNOWN, "the name of a phase is text"),
        ({"loss": torch.ones(())}, KNOWN, "was given a Tensor. It takes a function"),
    ],
)
def test_what_there_is_not_is_named(given: dict[str, Any], known: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        batch_of([], [], known).minimize(**({"loss": some_loss} | given))


def test_an_error_that_the_step_caught_comes_back() -> None:
    def fail(phase: Phase) -> float:
        raise RuntimeError("lost")

    batch = StepBatch(0, KNOWN, (), fail)
    with pytest.raises(RuntimeError, match="lost"):
        batch.minimize(some_loss)
    with pytest.raises(RuntimeError, match="lost"):
        batch.minimize(some_loss)
    with pytest.raises(RuntimeError, match="lost"):
        batch.end()


RESULTS = st.lists(
    st.builds(
        PhaseResult,
        st.sampled_from(["a", "b"]),
        st.floats(-1e3, 1e3),
        st.none() | st.floats(0, 1e3),
        parts=st.dictionaries(st.sampled_from(["x", "y"]), st.floats(-1e3, 1e3)),
    ),
    min_size=1,
    max_size=5,
)


@given(RESULTS)
def test_what_is_told_of_a_step(phases: list[PhaseResult]) -> None:
    losses = losses_of(phases)
    assert losses.keys() == {phase.name for phase in phases}
    for name, loss in losses.items():
        own = [phase.loss for phase in phases if phase.name == name]
        assert loss == pytest.approx(sum(own) / len(own))
    assert total_of(phases) == pytest.approx(sum(losses.values()))
    found = parts_of(phases)
    assert found.keys() - losses.keys() == {f"{p.name}.{key}" for p in phases for key in p.parts}
    norms = [phase.norm for phase in phases if phase.norm is not None]
    expected = sum(n * n for n in norms) ** 0.5 if norms else None
    assert norm_of(phases) == (None if expected is None else pytest.approx(expected))


def test_a_loss_must_depend_on_what_its_phase_trains() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 1)
    known = {"a": list(a.parameters()), "b": list(b.parameters())}
    both, only_b = b(a(torch.ones(2))).sum(), b(a(torch.ones(2)).detach()).sum()
    for of in ((), ("a",), ("b",), ("a", "b")):
        refuse_independent(both, Phase(0, "both", some_loss, of), known)
    refuse_independent(only_b, Phase(0, "b", some_loss, ("b", "a")), known)
    with pytest.raises(RecipeError, match="phase 1, a of a does not depend on a parameter of 'a'"):
        refuse_independent(only_b, Phase(0, "a", some_loss, ("a",)), known)
