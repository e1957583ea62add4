"""What a stage reaches without being given it is there, or the plan is refused.

Each stage runs in a copy of its own, with the parameters of the others dropped, as ranks do it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import PlanError
from shoal.parallel.pipeline.calls import CallInterceptor
from shoal.parallel.pipeline.placeholders import RemoteParameter, drop_unowned, in_use_by
from shoal.parallel.pipeline.stage_runner import StageRunner
from shoal.training.run import call_model
from tests.unit.parallel.test_stages import WIDTH, Layers, compare, examples, plan_for, squares


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def stages_in_turn(kind: Callable[[], nn.Module], num_stages: int, inputs: Any) -> Any:
    """The output of the last stage, and whether a stage but the first held what it needed."""
    plan = plan_for(made(kind), examples(2), num_stages)
    sent: Any = ()
    for spec in plan.stages:
        model = made(kind)
        drop_unowned(model, plan.held_by([spec.index]))
        stage = StageRunner(CallInterceptor(model), plan.tape, spec, spec.index == num_stages - 1)
        with torch.no_grad():
            sent = stage(partial(call_model, model, inputs), sent)
    return sent


class Mixes(nn.Module):
    """Multiplies by a matrix that it is handed, or finds for itself."""

    def __init__(self, find: Callable[[Any], Tensor] = lambda given: given) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.find = find

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        out: Tensor = self.inner(x) @ self.find(given)
        return out


class Runs(nn.Module):
    """A function without parameters of its own."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


class Tabled(Layers):
    """A table of the parent's own, used at the start and again by a submodule near the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.mixes = Mixes()

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.b(self.a(x @ self.table)))
        out: Tensor = self.d(self.late(x))
        return out

    def late(self, x: Tensor) -> Tensor:
        out: Tensor = self.mixes(x, self.table)
        return out


class InTree(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.mixes = Mixes(lambda given: given["tables"][0])

    def late(self, x: Tensor) -> Tensor:
        out: Tensor = self.mixes(x, {"tables": [self.table]})
        return out


class Holder:
    """Any object."""


class OfAnObject(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.holder.table = self.table  # type: ignore[attr-defined]
        self.mixes = Mixes(lambda given: given.table)

    def late(self, x: Tensor) -> Tensor:
        out: Tensor = self.mixes(x, self.holder)
        return out


class Closure(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.mixes = Mixes(lambda given: self.table)


class OfASibling(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.mixes = Mixes(lambda given: self.a.weight)


class Alias(Tabled):
    """A tensor with the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        alias = self.table.detach()
        self.mixes = Mixes(lambda given: alias)


class Partial(Tabled):
    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs(partial(F.linear, weight=self.table))

    def late(self, x: Tensor) -> Tensor:
        out: Tensor = self.runs(x)
        return out


class HandedOn(Tabled):
    """A submodule without parameters is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs(torch.matmul)

    def late(self, x: Tensor) -> Tensor:
        out: Tensor = self.runs(x, self.table)
        return out


class OnInputs(Tabled):
    """Nothing computed goes in, but a parameter does."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs(lambda x: x @ self.table)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.runs(x)
        return out


class Functional(Tabled):
    """A submodule runs with weights that were computed."""

    def late(self, x: Tensor) -> Tensor:
        given = {"weight": self.a.weight * 2, "bias": self.b.bias}
        out: Tensor = torch.func.functional_call(self.c, given, (x,))
        return out


class Computed(Layers):
    """A submodule finds a computed tensor on another object."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.runs = Runs(lambda x: x + self.holder.first)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        first = self.holder.first = self.a(x)  # type: ignore[attr-defined]
        out: Tensor = self.d(self.runs(self.c(self.b(first * 2))))
        return out


class KeptAside(Layers):
    """A submodule finds what another one kept, which it also returned."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.keeps = Runs(self.keep)
        self.runs = Runs(lambda x: x + self.holder.kept)  # type: ignore[attr-defined]

    def keep(self, x: Tensor) -> Tensor:
        self.holder.kept = kept = x.tanh()  # type: ignore[attr-defined]
        return kept

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(self.runs(self.b(self.keeps(self.a(x))))))
        return out


REACH = [
    Tabled, InTree, OfAnObject, Closure, OfASibling, Alias, Partial, HandedOn, OnInputs, Functional,
    Computed, KeptAside,
]  # fmt: skip


@pytest.mark.parametrize("kind", REACH)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_a_submodule_reaches_is_there(kind: type[nn.Module], num_stages: int) -> None:
    inputs = examples(1)[0]
    with torch.no_grad():
        expected = made(kind)(inputs)
    assert torch.equal(stages_in_turn(kind, num_stages, inputs), expected)
    if kind is not Alias:  # which has no gradient, and takes another path backward
        compare(made(kind), examples(2), num_stages, squares)


class Cached(Layers):
    """The first user makes what all use; a stage that does not have it makes it too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}
        self.runs = nn.ModuleList(Runs(self.shifted) for _ in range(2))

    def shifted(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.cache:
            self.cache[x.shape[1]] = torch.arange(x.shape[1]) / WIDTH
        return x + self.cache[x.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.runs[1](self.c(self.b(self.runs[0](self.a(x))))))
        return out


def test_a_cache_keeps_nothing_together() -> None:
    plan = compare(made(Cached), examples(2), 4, squares)
    assert not plan.tape.uncut


class ReadsMean(Layers):
    """Reads a running mean that a submodule changes, at once or later."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.norm, self.at_once = nn.BatchNorm1d(WIDTH), at_once

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        mean = self.norm.running_mean
        assert mean is not None
        if self.at_once:
            mean = mean * 2
        out: Tensor = self.d(self.c(self.b(x))) * mean
        return out


@torch.jit.script
def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


class Scripted(Layers):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(scripted(self.b(self.a(x)), self.a.weight)))
        return out


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (partial(ReadsMean, True), r"reads the buffer norm\.running_mean, which its submodule"),
        (partial(ReadsMean, False), r"changes its buffer norm\.running_mean in its forward, and"),
        (Scripted, r"compiled code, such as torch\.jit\.script's, calls \w+ unseen"),
    ],
)
def test_what_a_later_stage_would_see_as_it_was_is_refused(
    kind: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        plan_for(made(kind), examples(2), 2)


def test_compiled_code_stays_whole_below() -> None:
    class Outer(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scripted()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.d(self.c(self.inner(self.a(x))))
            return out

    plan = compare(made(Outer), examples(2), 2, squares)
    assert plan.tape.open == {""}


class Compiled(Layers):
    """A function of the model's own that torch.compile has taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.squashed = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(self.squashed(self.b(self.squashed(self.a(x))))))
        return out


def test_a_compiled_function_runs_as_it_was_written() -> None:
    compare(made(Compiled), examples(2), 3, squares)


class Sometimes(Tabled):
    """Reaches the table for large inputs only, which no recording saw."""

    def late(self, x: Tensor) -> Tensor:
        return self.mixes(x, None)  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.large = False
        self.mixes = Mixes(lambda _: self.table if self.large else torch.eye(WIDTH))


def test_a_dropped_parameter_is_never_computed_with() -> None:
    model = made(Sometimes)
    plan = plan_for(model, examples(2), 2)
    spec = plan.stages[1]
    assert "table" not in spec.parameters
    drop_unowned(model, plan.held_by([1]))
    model.large = True
    stage = StageRunner(CallInterceptor(model), plan.tape, spec, True)
    received = [torch.ones(plan.tape.values[n].shape) for n in spec.received]
    with pytest.raises(
        PlanError, match="Stage 1 of the pipeline uses the parameter table, which is on another"
    ):
        stage(partial(model, examples(1)[0]), received)


def test_a_dropped_parameter_keeps_its_form_and_its_place() -> None:
    model = Layers()
    held = [model.a.weight, model.b.weight]
    drop_unowned(model, {"b.weight"})
    assert model.a.weight is held[0] and model.b.weight is held[1]
    assert isinstance(model.a.weight, RemoteParameter) and type(model.b.weight) is nn.Parameter
    with in_use_by("The loss"):
        assert model.a.weight.shape == (WIDTH, WIDTH) and not model.a.weight.requires_grad
        assert model.a.weight.device.type == "cpu" and len(model.a.weight) == WIDTH
        with pytest.raises(PlanError, match=r"The loss uses the parameter a\.weight"):
            torch.stack([p.square().sum() for p in (model.b.weight, model.a.weight)])
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()}
