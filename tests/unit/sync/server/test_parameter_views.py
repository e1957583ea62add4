"""In lockstep on one host parameters are read where servers have them, and nothing is copied."""

from collections.abc import Sequence

import pytest
import torch

from shoal.sync.server.layout import make_layout
from shoal.sync.server.parameter_views import ParameterAddress, parameter_addresses
from shoal.sync.server.server import Server
from tests.unit.sync.server.attached import Model, alone, trained_at


def stands(model: Model, servers: Sequence[Server]) -> list[bool]:
    """Whether each parameter is in memory that servers show now: written there, it is seen here."""
    found = []
    for p in model.parts:
        before = p.detach().clone()
        kept = [(v, v.clone()) for s in servers for v in s.shard.values.values()]
        for value, _ in kept:
            value.fill_(-1.0)
        found.append(bool((p == -1.0).all()))
        for value, old in kept:
            value.copy_(old)
        assert torch.equal(p, before)
    return found


def test_parameters_are_what_a_server_holds() -> None:
    with trained_at() as (model, strategy, servers, step):
        before = list(model.parts)
        steps = [1.0, -2.0, 0.5]
        for number in range(len(steps)):
            step(steps[number])
            assert stands(model, servers) == [True] * 3
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parts)
            for p, expected in zip(model.parts, alone(steps[: number + 1]), strict=True):
                assert torch.equal(p, expected)
        assert all(p is old for p, old in zip(model.parts, before, strict=True))
        strategy.detach()
        assert stands(model, servers) == [False] * 3, "nothing is left of the server's memory"
        for p, expected in zip(model.parts, alone(steps), strict=True):
            assert torch.equal(p, expected)


def test_what_several_servers_hold_of_a_parameter_is_copied() -> None:
    with trained_at(num_servers=2) as (model, _, servers, step):
        step(1.0)
        shown = parameter_addresses(servers[0].layout)
        assert 0 not in shown and shown, "the largest is cut, and some are whole"
        assert stands(model, servers) == [number in shown for number in range(3)]
        for p, expected in zip(model.parts, alone([1.0]), strict=True):
            assert torch.equal(p, expected)


def test_memory_that_another_tensor_uses_stays_where_it_is() -> None:
    with trained_at(shares=True) as (model, _, servers, step):
        step(1.0)
        assert stands(model, servers) == [True, True, False]
        assert torch.equal(model.alias, alone([1.0])[-1])


def test_out_of_lockstep_parameters_are_the_workers_own() -> None:
    with trained_at(bound=None) as (model, _, servers, step):
        step(1.0)
        assert stands(model, servers) == [False] * 3
        for p, expected in zip(model.parts, alone([1.0]), strict=True):
            assert torch.equal(p, expected)


def test_a_step_leaves_what_workers_compute_with() -> None:
    """Who does a torn step again begins with the same parameters."""
    with trained_at() as (model, _, (server,), step):
        step(1.0)
        shown = [p.detach() for p in model.parts]
        kept = [value.clone() for value in shown]
        step(2.0)
        assert all(torch.equal(value, old) for value, old in zip(shown, kept, strict=True))
        assert server.shard.sets.now == 0, "it has turned twice"


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_a_parameter_stands_where_its_keys_do(num_servers: int) -> None:
    sizes = [(size, 4, "float") for size in (1_500_000, 40, 1_000, 3_000_000, 1, 5_000)]
    layout = make_layout(sizes, True, num_servers)
    found = parameter_addresses(layout)
    assert set(found) == set(range(6)) if num_servers == 1 else {1, 4} <= set(found)
    for number, stand in found.items():
        for server in range(num_servers):
            for key, place in zip(layout.held_by(server), layout.value_places(server)):
                for s in layout.segments(key):
                    if s.parameter == number:
                        start = place + 4 * (s.place - s.start)
                        assert ParameterAddress(server, start) == stand
