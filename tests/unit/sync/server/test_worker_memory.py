"""How a worker's rows come to where servers read them, and how it waits for what they answer."""

import os

import pytest
import torch
from torch import Tensor, nn

from shoal.sync.server import worker_memory
from tests.unit.sync.server import attached
from tests.unit.sync.server.attached import trained_at


@pytest.mark.parametrize(("frames", "num_streamed"), [(False, 3), (True, 0)])
def test_only_what_servers_read_is_copied_past_the_cache(
    frames: bool, num_streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: list[int] = []

    def stream(places: list[Tensor], values: list[Tensor]) -> None:
        streamed.extend(place.numel() for place in places)
        torch._foreach_copy_(places, values)

    monkeypatch.setattr(worker_memory, "copy_uncached", stream)
    with trained_at(frames=frames) as (_, _, _, step):
        step(1.0)
    assert len(streamed) == num_streamed


def test_who_waits_for_a_server_gives_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained_at() as (_, strategy, _, step):
        poll, policies = strategy.client._poller.poll, []

        def watched(timeout: int) -> list[tuple[object, int]]:
            policies.append(os.sched_getscheduler(0))
            return poll(timeout)

        monkeypatch.setattr(strategy.client._poller, "poll", watched)
        step(1.0)
        assert {*policies} == {os.SCHED_BATCH} and os.sched_getscheduler(0) == os.SCHED_OTHER


class Strided(attached.Model):
    """One of its parameters is transposed, so its elements stand in another order."""

    def __init__(self, shares: bool = False):
        super().__init__(shares)
        self.parts[0] = nn.Parameter(torch.arange(2_000.0).view(40, 50).t())


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize("bound", [0, None])
def test_elements_stay_where_they_stand(
    frames: bool, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "Model", Strided)
    with trained_at(3, bound, frames=frames) as (model, strategy, _, step):
        for value in (1.0, -2.0, 0.5):
            step(value)
            strategy.wait_for_parameters()
        assert model.parts[0].stride() == (1, 50)
        for p, expected in zip(model.parts, attached.alone([1.0, -2.0, 0.5]), strict=True):
            assert torch.equal(p, expected)
