"""Parameters that come while a forward reads them: whoever reads one has the new one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import GroupLost
from shoal.sync.server import lazy_pull, session
from tests.unit.sync.server.attached import alone, trained_at


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes with an answer, and each key alone."""
    monkeypatch.setattr(session, "FEW_BYTES", 0)
    monkeypatch.setattr(lazy_pull, "PART_BYTES", 1)


def streamed(num_servers: int = 1, bound: int | None = 0) -> Any:
    return trained_at(num_servers, bound, frames=True, meets_after=lambda step: False)


READS = {
    "a function": lambda p: p * 1,
    "a method": lambda p: p.clone(),
    "a view": lambda p: p.detach()[:],
    "a list": lambda p: torch.cat([p, p])[: len(p)],
    "by name": lambda p: torch.mul(input=p, other=1),
    "another's": lambda p: F.linear(torch.ones(1, 1), p[:, None])[0],
    "a kernel of its own": lambda p: _Twice.apply(p) / 2,
    "numbers": lambda p: torch.tensor(p.tolist()),
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2


@pytest.mark.parametrize("bound", [0, None])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_whoever_reads_a_parameter_waits_for_it(read: Any, bound: int | None) -> None:
    with streamed(2, bound) as (model, strategy, _, step):
        step(1.0)
        assert not strategy._lazy_pull.is_complete
        with torch.no_grad(), strategy.microbatch(True, True):
            for p, expected in zip(reversed(model.parts), reversed(alone([1.0])), strict=True):
                assert torch.equal(read(p).detach(), expected)
                p.grad = torch.ones_like(p)
        assert strategy._lazy_pull.is_complete


def test_memory_counts_and_not_who_reads_it() -> None:
    with streamed() as (model, strategy, _, step):
        kept = [p.detach() for p in model.parts]
        step(1.0)
        with strategy.microbatch(True, True):
            assert all(map(torch.equal, (k * 1 for k in kept), alone([1.0])))


def test_a_module_waits_for_its_own_parameters() -> None:
    """Also if its forward gives their address to something that is not torch."""

    class Own(nn.Module):
        def __init__(self, p: nn.Parameter):
            super().__init__()
            self.p = p
            self.address = p.detach().numpy()

        def forward(self) -> list[float]:
            found: list[float] = self.address.tolist()
            return found

    with streamed() as (model, strategy, _, step):
        modules = [Own(p) for p in model.parts]
        step(1.0)
        with strategy.microbatch(True, True):
            found = [torch.tensor(module()) for module in modules]
        assert all(map(torch.equal, found, alone([1.0])))


@pytest.mark.parametrize("bound", [0, None])
def test_steps_follow_steps(bound: int | None) -> None:
    """Here nobody reads a parameter at all."""
    values = [1.0, -0.5, 2.0, 0.25]
    with streamed(2, bound) as (model, strategy, _, step):
        for value in values:
            step(value)
        strategy.wait_for_parameters()
        assert all(map(torch.equal, model.parts, alone(values)))


def test_a_module_that_is_not_training_finds_everything() -> None:
    with streamed() as (model, strategy, _, step):
        model.parts.eval()
        step(1.0)
        with strategy.microbatch(True, True):
            assert strategy._lazy_pull.is_complete


def test_a_write_that_arrives_is_none_of_the_forward() -> None:
    with streamed() as (model, strategy, _, step):
        versions = [p._version for p in model.parts]
        step(1.0)
        strategy.wait_for_parameters()
        assert [p._version for p in model.parts] == versions


def test_a_step_that_all_look_at_is_taken_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trained_at(frames=True) as (model, strategy, _, step):
        before = [p.detach().clone() for p in model.parts]
        answer, calls = strategy.client.answer, []

        def lose(request: int) -> Any:
            found = answer(request)
            calls.append(type(found[0]).__name__)
            if calls.count("FetchedKeys") == 2:
                raise GroupLost("a test broke it")
            return found

        monkeypatch.setattr(strategy.client, "answer", lose)
        with pytest.raises(GroupLost):
            step(1.0)
        assert all(map(torch.equal, model.parts, before))
        assert strategy.batch == 0


def test_what_was_torn_is_pulled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(2) as (model, strategy, _, step):
        step(1.0)
        strategy._lazy_pull._fetcher.take(strategy._memory.put)
        mesh, optimizer = strategy.mesh, strategy.attached.optimizer
        strategy.detach()
        assert not all(map(torch.equal, model.parts, alone([1.0])))
        strategy.attach(model, optimizer, mesh)
        assert all(map(torch.equal, model.parts, alone([1.0])))
        assert strategy.batch == 1
