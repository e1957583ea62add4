"""Optimizers of one's own: a step that wants a closure, and what it keeps beside its state."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal
from shoal import logs
from shoal.errors import RecipeError
from shoal.numerics.optimizers import ParameterPart, refuse_closures, stepper, swap_parameters


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_said", set())
    logs.for_the_screen.clear()


class Evaluating(torch.optim.SGD):
    def step(self, closure):  # type: ignore[override]
        closure()


class Calling(torch.optim.SGD):
    def step(self, closure=None):
        with torch.enable_grad():
            closure()


class Asserting(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None


class Handing(torch.optim.SGD):
    def step(self, closure=None):
        return self._go(closure)

    def _go(self, closure):
        raise ValueError("of something else")


class HandingOn(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Counting(torch.optim.SGD):
    def __init__(self, named, first):
        super().__init__(named, lr=0.1)
        self.own = first()
        self.parameters = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.first_was = True  # made once
        match self.own:
            case int():
                self.own += 1
            case torch.Tensor():
                self.own *= 0.9
            case {"a": [number]}:
                self.own = {"a": [number + 1.0]}
        super().step()


def model() -> nn.Module:
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    return net


@pytest.mark.parametrize("kind", [Evaluating, torch.optim.LBFGS])
def test_a_step_that_cannot_do_without_a_closure_is_refused(kind) -> None:
    with pytest.raises(RecipeError, match=f"step of {kind.__name__} wants a closure"):
        refuse_closures(kind(model().parameters(), lr=0.1))
    with pytest.raises(RecipeError, match="wants a closure"):
        refuse_closures(shoal.Optimizers(kind(model().parameters(), lr=0.1)))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor, Calling, HandingOn])
def test_others_are_not(kind) -> None:
    refuse_closures(kind(model().parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [Calling, Asserting])
def test_a_step_that_misses_its_closure_says_so(kind) -> None:
    with pytest.raises(RecipeError, match=f"step of {kind.__name__} wants a closure"):
        stepper(kind(model().parameters(), lr=0.1))()


def test_another_error_of_a_step_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="of something else"):
        stepper(Handing(model().parameters(), lr=0.1))()


@pytest.mark.parametrize("first", [int, lambda: torch.ones(2), lambda: {"a": [1.0]}])
def test_what_steps_change_beside_the_state_is_told_once(first: Callable[[], object]) -> None:
    step = stepper(Counting(model().parameters(), first))
    for _ in range(4):
        step()
    (said,) = logs.for_the_screen
    assert "step of Counting changes own, which is not in its state or its groups" in said


@pytest.mark.parametrize(
    "make",
    [
        lambda named: Counting(named, lambda: "constant"),
        lambda named: HandingOn(named, lr=0.1),
        lambda named: shoal.Optimizers(torch.optim.AdamW(named)),
        *(
            lambda named, kind=kind: kind(named, lr=0.1)
            for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop)
        ),
    ],
)
def test_nothing_is_said_of_others(make) -> None:
    step = stepper(make(model().parameters()))
    for _ in range(3):
        step()
    assert not logs.for_the_screen


@pytest.mark.parametrize("kind", [Counting, torch.optim.AdamW])
def test_parameters_that_it_keeps_for_itself_are_told_of_where_it_gets_others(kind) -> None:
    own = {"first": int} if kind is Counting else {}
    optimizer = kind(model().parameters(), **own)
    swap_parameters(
        shoal.Optimizers(optimizer),
        lambda p: [ParameterPart(nn.Parameter(p.detach()), lambda t: t)],
    )
    assert [said.split(",")[0] for said in logs.for_the_screen] == (
        ["Counting keeps parameters in parameters"] if own else []
    )


def test_nothing_is_said_where_they_stay() -> None:
    swap_parameters(Counting(model().parameters(), int), lambda p: None)
    swap_parameters(Counting(model().parameters(), int), lambda p: [ParameterPart(p, lambda t: t)])
    assert not logs.for_the_screen
