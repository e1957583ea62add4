"""Tapes, cuts and stages in one process: N stages one after another are the model."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.errors import PlanError
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.pipeline.calls import CallInterceptor
from shoal.parallel.pipeline.cuts import SLACK, balance, bytes_crossing, live_at
from shoal.parallel.pipeline.placeholders import drop_unowned
from shoal.parallel.pipeline.stage_runner import StageRunner
from shoal.parallel.pipeline.stages import (
    StagePlan,
    rank_of_stage,
    record,
    recut,
    split_stages,
)
from shoal.parallel.pipeline.tape import find_tensors
from shoal.training.run import call_model
from tests import zoo
from tests.ranks.test_pipeline import batches

WIDTH = 8


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


def examples(count: int = 2, size: int = 4) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(size, WIDTH, generator=draws) for _ in range(count)]


def plan_for(
    model: nn.Module, inputs: Sequence[Any], num_stages: int, seeds: PieceSeeds | None = None
) -> StagePlan:
    forwards = [partial(call_model, model, x) for x in inputs[:2]]
    return split_stages(record(model, forwards, num_stages, seeds), num_stages)


class Relay:
    """All stages in one process: tensors go from one to the next as ranks would send them."""

    def __init__(self, model: nn.Module, plan: StagePlan):
        self.model, self.plan, self.interceptor = model, plan, CallInterceptor(model)
        last = len(plan.stages) - 1
        self.stages = [
            StageRunner(self.interceptor, plan.tape, s, s.index == last) for s in plan.stages
        ]

    def train(
        self, inputs: Any, loss: Callable[[Any], Tensor], before: Callable[[], Any]
    ) -> Tensor:
        given: list[list[Tensor]] = []
        made: list[Any] = []
        for stage in self.stages:
            sent = made[-1] if made else ()
            needs = self.plan.tape.need_gradient
            given.append(
                [t.detach().requires_grad_(n in needs) for n, t in zip(stage.spec.received, sent)]
            )
            before()
            made.append(stage(partial(call_model, self.model, inputs), given[-1]))
        total = loss(made[-1])
        total.backward()
        for index in range(len(self.stages) - 1, 0, -1):
            pairs = [(t, g.grad) for t, g in zip(made[index - 1], given[index]) if t.requires_grad]
            pairs = [(t, torch.zeros_like(t) if g is None else g) for t, g in pairs]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        self.interceptor.close()
        return total


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def compare(
    model: nn.Module,
    inputs: Sequence[Any],
    num_stages: int,
    loss: Callable[..., Tensor],
    tolerance: float = 0.0,
) -> StagePlan:
    """Train one step both ways and hold losses, gradients and later draws against each other."""
    seeds = PieceSeeds(model, 5)
    plan = plan_for(model, inputs, num_stages, seeds)
    for one in inputs:
        seeds.enter(2, 1)
        expected = loss(call_model(model, one))
        expected.backward()
        wanted, draw = gradients(model), torch.rand(3)
        told = Relay(model, plan).train(one, loss, partial(seeds.enter, 2, 1))
        torch.testing.assert_close(told, expected, atol=tolerance, rtol=0)
        assert torch.equal(torch.rand(3), draw)
        for name, grad in gradients(model).items():
            want = wanted[name]
            assert (grad is None) == (want is None), name
            if grad is not None and want is not None:
                torch.testing.assert_close(grad, want, atol=1e-5, rtol=1e-5)
    seeds.close()
    return plan


def squares(output: Any) -> Tensor:
    return torch.stack([t.square().sum() for t in find_tensors(output) if t.requires_grad]).sum()


# ---- stages are the model


FEW = [("mlp", 4), ("cnn", 3), ("unet", 4), ("lstm", 2), ("gpt", 8), ("moe", 2), ("towers", 4),
       ("encoder", 3), ("frozen", 4), ("several", 3), ("seq2seq", 2)]  # fmt: skip
MANY = [pytest.param(name, 4, marks=pytest.mark.full) for name in (*zoo.TEN, *zoo.MORE)]


@pytest.mark.parametrize(("name", "num_stages"), [*FEW, *MANY])
def test_stages_in_turn_are_the_model(name: str, num_stages: int) -> None:
    if name in ("gpt2", "llama", "bert", "t5", "bart"):
        pytest.importorskip("transformers")
    run = getattr(zoo, name)()
    inputs, targets = batches(run, 0, 2)
    model = run.make_model().train()

    def loss(output: Any) -> Tensor:
        answer = run.loss(output, targets[0])
        found: Tensor = answer[0] if isinstance(answer, tuple) else answer
        return found

    # T5 differs in the last bits for some inputs once a value is a copy, even one of equal strides;
    # why is not known.
    plan = compare(model, inputs, num_stages, loss, tolerance=1e-6 if name == "t5" else 0.0)
    assert len(plan.stages) == num_stages
    assert all(stage.parameters for stage in plan.stages)
    assert abs(sum(stage.share for stage in plan.stages) - 1) < 1e-6
    assert set(plan.holders) == {name for name, _ in model.named_parameters()}
    assert plan.held_by(range(num_stages)) == set(plan.holders)


class InPlace(Layers):
    """Writes into computed tensors, into a raw one, and into a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y += x
        y.relu_()
        room = torch.zeros(x.shape[0], 2 * WIDTH)
        room[:, :WIDTH] = y
        z = self.c(self.b(y))
        room.narrow(1, WIDTH, WIDTH).copy_(z)
        z.mul_(2)
        out: Tensor = self.d(z) + room[:, :WIDTH] * room[:, WIDTH:]
        return out


class Views(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        flat = y.view(-1)
        z = self.b(y * 1)
        flat.mul_(2.0)
        out: Tensor = self.d(self.c(z) + y)
        return out


class Tree(Layers):
    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.a(x)
        return {"y": self.d(self.c(self.b(first))), "also": [first, (x, None)], "count": 3}


class State:
    """An object of the model's own that carries a tensor."""


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> Tensor:
        out: Tensor = self.inner(state.kept)  # type: ignore[attr-defined]
        return out


class Carries(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()

    def forward(self, x: Tensor) -> Tensor:
        state = State()
        state.kept = self.a(x)  # type: ignore[attr-defined]
        y = self.c(self.b(x))
        out: Tensor = self.d(self.reads(state) + y)
        return out


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.a, x, use_reentrant=False)
        x = checkpoint(self.inner, x, use_reentrant=False)
        out: Tensor = checkpoint(self.d, x, use_reentrant=False)
        return out

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(F.relu(self.b(x)))
        return out


class Matrices(nn.Module):
    """Parameters without modules, one of them used by every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.each:
            x = torch.tanh(x @ matrix.T) * self.scale
        return x


class Hooked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 2 * grad)
        if not y.is_contiguous():
            raise AssertionError("a linear layer's output is contiguous")
        out: Tensor = self.d(self.c(self.b(y)) + y)
        return out


class Unpacks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.b(self.a(x))
        out: Tensor = self.d(self.c(torch.stack([first, *rest])))
        return out


class WithoutGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.b(self.a(x))
        out: Tensor = self.d(self.c(x))
        return out


class ByIndex(nn.Module):
    """Calls the members of its sequences one by one, and never a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x).tanh()
        out: Tensor = self.last[1](self.last[0](x))
        return out


ODD = [
    ByIndex, InPlace, Views, Tree, Carries, Checkpointed, Matrices, Hooked, Unpacks, WithoutGradient
]  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_odd_forwards_are_cut_rightly(kind: type[nn.Module], num_stages: int) -> None:
    torch.manual_seed(0)
    compare(kind(), examples(3), num_stages, squares)


def test_no_cut_falls_into_a_checkpointed_call_or_between_views() -> None:
    plan = plan_for(Checkpointed(), examples(), 3)
    names = [event.name for event in plan.tape.events]
    assert names == ["a", "b", "relu", "c", "d"]
    assert [stage.start for stage in plan.stages] == [0, 1, 4]
    views = plan_for(Views(), examples(), 2).tape
    kept = [event.name for i, event in enumerate(views.events) if i in views.uncut]
    assert "mul_" in kept and "view" not in kept


class Draws(nn.Module):
    """Draws at random at its top level, before and between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        kept = torch.rand(x.shape[0], 1) > 0.2
        for block in self.blocks:
            if torch.rand([]) < 0.0:  # left out at random, as some encoders do
                continue
            x = block(x) * kept
        return x


class DrawsLate(Layers):
    """What is drawn after an event has drawn cannot be drawn again by a later stage."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(F.dropout(self.a(x), 0.5))
        noise = torch.rand(x.shape)
        out: Tensor = self.d(self.c(x)) + noise
        return out


def test_draws_are_those_of_the_undivided_model() -> None:
    plan = compare(Draws(), examples(), 4, squares)
    assert plan.tape.draws_again == {"dropout", "rand"} and not plan.tape.drawing
    late = DrawsLate()
    tape = record(late, [partial(late, x) for x in examples()], 2, PieceSeeds(late, 0))
    assert tape.drawing == {"rand"}
    assert [event.name for event in tape.events if event.is_fresh] == ["a", "dropout"]
    assert [stage.block for stage in plan.stages] == [0, 2, 4, 6]
    assert all(plan.tape.events[stage.start].is_fresh for stage in plan.stages)


# ---- recording


def test_recording_leaves_no_trace() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, 1)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seeds = PieceSeeds(model, 0)
    seeds.enter(3, 4)
    state = torch.get_rng_state()
    plan_for(model, examples(), 2, seeds)
    assert torch.equal(torch.get_rng_state(), state) and seeds.is_unused and seeds.block == 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert all("_compiled_call_impl" not in m.__dict__ for m in model.modules())
    seeds.close()


class Branches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum().item() > 0:
            x = self.b(x)
        out: Tensor = self.d(self.c(x))
        return out


class Longer(Layers):
    """Takes more steps for some data, and never asks a computed tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if x[0, 0] > 0 else 1):
            x = self.a(x)
        out: Tensor = self.d(self.c(self.b(x)))
        return out


class Around(Layers):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.c(self.inner(self.a(x))))
        return out


def test_what_depends_on_data_is_refused_at_the_top_and_stays_whole_below() -> None:
    with pytest.raises(PlanError, match="in its forward item turns a computed tensor into") as told:
        plan_for(Branches(), examples(), 2)
    assert "submodule of its own" in str(told.value) and told.value.exit_code == 2
    signs = [torch.ones(2, WIDTH), -torch.ones(2, WIDTH)]
    with pytest.raises(
        PlanError, match=r"Longer cannot be cut into stages.*differs from one batch"
    ):
        plan_for(Longer(), signs, 2)
    for inner in (Branches(), Longer()):
        plan = compare(Around(inner), [*examples(3), *signs], 3, squares)
        assert plan.tape.open == {""}
        assert "inner" in [event.name for event in plan.tape.events]


class Keeps(nn.Module):
    """Leaves a tensor on itself for others to read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.kept = out.detach().square().mean()
        return out


class ReadsKept(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.keeps = Keeps()

    def forward(self, x: Tensor) -> Tensor:
        x = self.d(self.c(self.b(self.keeps(self.a(x)).tanh())))
        return x + self.keeps.kept


class Counts(Layers):
    """Changes a buffer in code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)).tanh()
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        out: Tensor = self.d(self.c(x))
        return out


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ReadsKept, r"uses keeps\.kept, a tensor of shape \(\) .* submodule keeps made and"),
        (Counts, "changes the buffer mean"),
    ],
)
def test_what_would_not_be_carried_is_refused(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_for(kind().train(), examples(), 2)


def test_a_backward_of_ones_own_stays_whole() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    class Own(Layers):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.d(self.c(self.b(Twice.apply(self.a(x)))))
            return out

    with pytest.raises(PlanError, match=r"it calls Twice\.apply, whose backward is its own"):
        plan_for(Own(), examples(), 2)
    compare(Around(Own()), examples(), 3, squares)


def test_too_many_stages_are_refused_with_the_most() -> None:
    with pytest.raises(PlanError, match=r"into 5 stages: 4 is the most.*Use at most 4 stages"):
        plan_for(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), examples(), 5)
    with pytest.raises(PlanError, match="Leave out pipeline"):
        plan_for(nn.LSTM(WIDTH, WIDTH), examples(), 2)


def test_recurrent_layers_count() -> None:
    model = zoo.lstm().make_model()
    inputs, _ = batches(zoo.lstm(), 0, 2)
    tape = record(model, [partial(call_model, model, x) for x in inputs], 2)
    costs = {event.name: event.cost for event in tape.events}
    recurrent = [n for n, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    assert recurrent
    share = sum(costs[name] for name in recurrent if name in costs) / sum(costs.values())
    assert share > 0.5


# ---- foreign parameters, other forms of input


def test_dropped_parameters_take_no_memory_and_keep_their_form() -> None:
    model = zoo.gpt(dropout=0.0).make_model()
    names = [name for name, _ in model.named_parameters()]
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    held = {"blocks.0.widen.weight"}
    drop_unowned(model, held)
    assert [name for name, _ in model.named_parameters()] == names
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in held)
        assert (parameter.untyped_storage().nbytes() > 8) == (name in held)
    assert model.head.weight is model.embed.weight


def test_a_new_form_of_input_is_cut_at_the_same_parameters() -> None:
    run = zoo.gpt()
    model = run.make_model().train()
    inputs, _ = batches(run, 0, 2)
    plan = plan_for(model, inputs, 4)
    owners = [set(stage.parameters) for stage in plan.stages]
    short = [x[:, :3] for x in inputs]
    for index in range(4):
        copy = run.make_model().train()
        drop_unowned(copy, plan.held_by([index]))
        forwards = [partial(call_model, copy, x) for x in short]
        other = recut(record(copy, forwards, 4, like=plan.tape), owners)
        assert [s.parameters for s in other.stages] == [s.parameters for s in plan.stages]
        assert [(s.start, s.sent) for s in other.stages] == [(s.start, s.sent) for s in plan.stages]
        # Every rank must expect the same gradients, whatever it holds.
        assert other.tape.need_gradient == plan.tape.need_gradient


def test_a_form_that_uses_parameters_in_another_order_is_refused() -> None:
    class Swaps(Layers):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x)) if x.shape[0] > 2 else self.a(self.b(x))
            return out

    model = Swaps()
    plan = plan_for(model, examples(), 2)
    small = examples(2, size=1)
    tape = record(model, [partial(model, x) for x in small], 2, like=plan.tape)
    with pytest.raises(PlanError, match=r"a comes where no stage that holds its parameters"):
        recut(tape, [set(stage.parameters) for stage in plan.stages])


# ---- pure decisions


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.booleans(), st.integers(0, 20)), min_size=2, max_size=8
    ),
    st.integers(2, 4),
)
def test_balance_is_the_best_there_is(rows: list[tuple[int, bool, int]], num_stages: int) -> None:
    costs = np.cumsum([0.0] + [float(cost) for cost, _, _ in rows])
    owns = np.cumsum([0] + [int(owned) for _, owned, _ in rows])
    sent = np.array([0.0] + [float(size) for _, _, size in rows[1:]] + [0.0])
    last = len(rows)

    def slowest(cuts: Sequence[int]) -> float:
        pairs = list(itertools.pairwise(cuts))
        if any(owns[a] == owns[b] for a, b in pairs):
            return float("inf")
        return float(max(costs[b] - costs[a] + sent[a] + sent[b] for a, b in pairs))

    ways = [(0, *cuts, last) for cuts in itertools.combinations(range(1, last), num_stages - 1)]
    possible = [cuts for cuts in ways if slowest(cuts) < float("inf")]
    if not possible:
        return
    best = min(map(slowest, possible))
    found = balance(costs, owns, sent, range(last + 1), num_stages)
    assert found[0] == 0 and found[-1] == last and len(found) == num_stages + 1
    assert slowest(found) <= SLACK * best
    cheap = [sum(sent[c] for c in cuts) for cuts in possible if slowest(cuts) <= SLACK * best]
    assert sum(sent[c] for c in found) == min(cheap)


def test_bytes_that_cross_are_those_of_live_values() -> None:
    run = zoo.unet()
    model = run.make_model()
    inputs, _ = batches(run, 0, 2)
    tape = plan_for(model, inputs, 4).tape
    sizes = bytes_crossing(tape)
    for cut in range(len(tape.events) + 1):
        assert sizes[cut] == sum(tape.values[n].num_bytes for n in live_at(tape, cut))


@given(st.integers(1, 8), st.integers(1, 4))
def test_every_rank_gets_as_many_stages(num_ranks: int, per_rank: int) -> None:
    for schedule, count in (("1f1b", 1), ("interleaved", per_rank), ("zbv", 2)):
        ranks = [rank_of_stage(s, num_ranks, schedule) for s in range(num_ranks * count)]
        assert sorted(ranks) == sorted([*range(num_ranks)] * count)
    there_and_back = [rank_of_stage(s, num_ranks, "zbv") for s in range(2 * num_ranks)]
    assert there_and_back == there_and_back[::-1]
