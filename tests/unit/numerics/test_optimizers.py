"""The fused choice and the bare step: the same numbers, and nobody who watches is left out."""

import pytest
import torch
from torch import nn

from shoal.numerics.optimizers import fuse, stepper


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
    fuse(chosen)
    assert not chosen.param_groups[0]["fused"]
    free = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    fuse(free)
    assert free.param_groups[0]["fused"]
