"""How a worker's rows come to where servers read them, and how it waits for what they answer."""

import os

import pytest
import torch
from torch import Tensor

from shoal.sync.server import memory
from tests.unit.sync.server.attached import trained_at


@pytest.mark.parametrize(("frames", "num_streamed"), [(False, 3), (True, 0)])
def test_only_what_servers_read_is_copied_past_the_cache(
    frames: bool, num_streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed: list[int] = []

    def stream(places: list[Tensor], values: list[Tensor]) -> None:
        streamed.extend(place.numel() for place in places)
        torch._foreach_copy_(places, values)

    monkeypatch.setattr(memory, "stream", stream)
    with trained_at(frames=frames) as (_, _, _, step):
        step(1.0)
    assert len(streamed) == num_streamed


def test_who_waits_for_a_server_gives_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained_at() as (_, strategy, _, step):
        poll, policies = strategy.line._poller.poll, []

        def watched(timeout: int) -> list[tuple[object, int]]:
            policies.append(os.sched_getscheduler(0))
            return poll(timeout)

        monkeypatch.setattr(strategy.line._poller, "poll", watched)
        step(1.0)
        assert {*policies} == {os.SCHED_BATCH} and os.sched_getscheduler(0) == os.SCHED_OTHER
