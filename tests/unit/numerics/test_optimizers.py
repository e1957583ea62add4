"""The fused choice, the bare step, and parts: the same numbers, and nobody is left out."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.numerics.optimizers import (
    Optimizers,
    ParameterPart,
    names_in,
    stepper,
    stepping_only,
    swap_parameters,
    use_fused_kernels,
)


def trained(make, step_of) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    optimizer = make(model.parameters())
    step = step_of(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(5, 7)).square().sum().backward()
        step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
    ],
)
def test_the_bare_step_is_the_step(make) -> None:
    bare, plain = trained(make, stepper), trained(make, lambda optimizer: optimizer.step)
    assert all(torch.equal(a, b) for a, b in zip(bare, plain, strict=True))


def test_hooks_and_overridden_steps_are_heard() -> None:
    called = []
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    step = stepper(optimizer)
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    step()
    assert called == ["post"]
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    other.step = lambda: called.append("own")
    stepper(other)()
    assert called == ["post", "own"]


def test_a_profiler_sees_the_step() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    step = stepper(optimizer)
    with torch.profiler.profile() as profile:
        step()
    assert any("Optimizer.step" in event.key for event in profile.key_averages())


def test_the_recipes_choice_is_kept() -> None:
    chosen = torch.optim.AdamW(nn.Linear(2, 2).parameters(), foreach=True)
    use_fused_kernels(chosen)
    assert not chosen.param_groups[0]["fused"]
    free = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    use_fused_kernels(free)
    assert free.param_groups[0]["fused"]


def halves(parameter: nn.Parameter) -> list[ParameterPart]:
    """Both halves of a parameter's elements, as views of it."""
    flat = parameter.detach().view(-1)
    middle = flat.numel() // 2
    runs = [slice(0, middle), slice(middle, None)]
    return [
        ParameterPart(nn.Parameter(flat[run]), lambda t, run=run: t.reshape(-1)[run])
        for run in runs
    ]


def step_on(parameters: list[nn.Parameter], stepped: list[list[ParameterPart]], optimizer) -> None:
    for step in range(3):
        for p, parts in zip(parameters, stepped, strict=True):
            gradient = torch.linspace(-1, 1, p.numel()).view(p.shape) * (step + 1)
            p.grad = None if parts else gradient
            for part in parts:
                part.parameter.grad = part.take(gradient).clone()
        optimizer.step()


@pytest.mark.parametrize(
    "kind",
    [
        lambda groups: torch.optim.AdamW(groups, lr=0.1),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5),
    ],
)
def test_parts_are_stepped_on_as_the_whole_is(kind) -> None:
    """Groups and names stay as they were, and so does state that was made with the optimizer."""
    ends = []
    for cuts in (False, True):
        torch.manual_seed(3)
        model = nn.Linear(6, 4)
        first, second = model.named_parameters()
        optimizer = kind([{"params": [first], "weight_decay": 0.3}, {"params": [second]}])
        parts = {model.weight: halves(model.weight) if cuts else []}
        if cuts:
            swap_parameters(optimizer, parts.get)
            one, two = optimizer.param_groups
            assert one["params"] == [part.parameter for part in parts[model.weight]]
            assert two["params"] == [model.bias], "there are no parts of it, so it stays"
            assert one["param_names"] == ["weight", "weight"] and two["param_names"] == ["bias"]
            assert one["weight_decay"] == 0.3
            assert model.weight not in optimizer.state
        step_on([model.weight, model.bias], [parts[model.weight], []], optimizer)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_state_that_is_there_early_is_cut_like_the_parameter() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.Adagrad([weight], initial_accumulator_value=0.5)
    optimizer.state[weight]["sum"] = torch.arange(16.0).view(4, 4)
    parts = halves(weight)
    swap_parameters(optimizer, {weight: parts[1:]}.get)
    (only,) = optimizer.state
    assert only is parts[1].parameter
    assert torch.equal(optimizer.state[only]["sum"], torch.arange(8.0, 16.0))
    assert optimizer.state[only]["step"].dim() == 0


def test_a_parameter_that_is_held_elsewhere_leaves_its_group() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    swap_parameters(optimizer, {model.weight: []}.get)
    (group,) = optimizer.param_groups
    assert group["params"] == [model.bias] and group["param_names"] == ["bias"]


@pytest.mark.parametrize("asked", [None, True])
def test_parameters_that_lie_otherwise_are_not_fused(asked: bool | None) -> None:
    """Torch's kernel would pair elements with the gradients of others."""

    def stepped(turned: bool) -> torch.Tensor:
        start = torch.arange(12.0).view(3, 4)
        p = nn.Parameter(start.t().contiguous().t() if turned else start)
        optimizer = torch.optim.AdamW([p], lr=0.1, fused=asked)
        use_fused_kernels(optimizer)
        p.grad = torch.linspace(-1, 1, 12).view(3, 4)
        optimizer.step()
        return p.detach()

    torch.testing.assert_close(stepped(True), stepped(False))


class Counts(torch.optim.SGD):
    """Notes in its groups how often it stepped, with or without gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def test_optimizers_with_names_step_apart() -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    both = Optimizers(Counts([third]), a=Counts([first], lr=0.5), b=Counts([second], lr=0.25))
    assert names_in(both) == ("a", "b") and names_in(both.members[0]) == ()
    assert both.parameters_of(["b", "a"]) == [second, first]
    for p in (first, second, third):
        p.grad = torch.ones(2)
    with stepping_only(both, ("a",)):
        stepper(both)()
    with stepping_only(both, ("a", "b")):
        stepper(both)()
    with stepping_only(both, ()):
        stepper(both)()
    assert [group["count"] for group in both.param_groups] == [1, 3, 2]
    assert first.tolist() == [-0.5, -0.5] and second.tolist() == [0.5, 0.5]


def test_an_optimizer_whose_step_fails_is_whole_again() -> None:
    both = Optimizers(**{name: Counts([nn.Parameter(torch.ones(1))]) for name in "ab"})
    with pytest.raises(RuntimeError, match="lost"), both.only(["b"]):
        raise RuntimeError("lost")
    stepper(both)()
    assert [group["count"] for group in both.param_groups] == [1, 1]
