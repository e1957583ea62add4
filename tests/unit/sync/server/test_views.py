"""In lockstep on one host parameters are read where servers have them, and nothing is copied."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.mesh import Mesh, Servers
from shoal.sync.server.layout import lay_out
from shoal.sync.server.serve import Desk
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard, layout_of
from shoal.sync.server.strategy import ThroughServers
from shoal.sync.server.views import Stand, stands_of
from shoal.sync.strategy import Tally

SIZES = (2_000, 300, 40)


class Model(nn.Module):
    """Three parameters, the last of which may share its memory with a frozen one."""

    def __init__(self, shares: bool = False):
        super().__init__()
        self.parts = nn.ParameterList(torch.arange(float(size)) for size in SIZES)
        if shares:
            self.alias = nn.Parameter(self.parts[-1].detach()[:], requires_grad=False)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)


@contextmanager
def trained_at(
    num_servers: int = 1, bound: int | None = 0, shares: bool = False
) -> Iterator[tuple[Model, ThroughServers, list[Server], Callable[[float], None]]]:
    """A worker with real servers in threads; and a step of its own, on equal gradients."""
    servers = []
    with ExitStack() as stack:
        addresses, is_over = [], threading.Event()
        for number in range(num_servers):
            held = Model(shares)
            optimizer = adam(held)
            shard = Shard(held, optimizer, layout_of(held, optimizer, num_servers, 1), number)
            server = Server(shard, num_seats=1, num_pieces=1, bound=bound, secret="x")
            server.begin(0)
            desk = Desk(server)
            stack.callback(desk.close)
            thread = threading.Thread(target=_serve, args=(desk, is_over))
            thread.start()
            stack.callback(thread.join)
            servers.append(server)
            addresses.append(desk.address)
        stack.callback(is_over.set)
        model, strategy = Model(shares), ThroughServers(1, bound)
        reached = Servers(tuple(addresses), 0, "x", lambda: False)
        mesh = Mesh(Group(), Group(), Group(), Group(), "cpu", servers=reached)
        strategy.attach(model, adam(model), mesh)
        stack.callback(strategy.detach)

        def step(value: float) -> None:
            with strategy.microbatch(True, True):
                for p in model.parts:
                    p.grad = torch.full_like(p, value)
            tally = Tally()
            tally.add(torch.tensor(1.0), 1.0, True)
            strategy.exchange(tally, want_norm=False)
            assert strategy.update(1.0, check=False)

        yield model, strategy, servers, step


def _serve(desk: Desk, is_over: threading.Event) -> None:
    while not is_over.is_set():
        desk.turn()


def alone(steps: Sequence[float]) -> list[Tensor]:
    """What one process makes of the same steps."""
    model = Model()
    optimizer = adam(model)
    for value in steps:
        for p in model.parts:
            p.grad = torch.full_like(p, value)
        optimizer.step()
    return [p.detach() for p in model.parts]


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
        shown = stands_of(servers[0].layout)
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
    layout = lay_out(sizes, True, num_servers)
    found = stands_of(layout)
    assert set(found) == set(range(6)) if num_servers == 1 else {1, 4} <= set(found)
    for number, stand in found.items():
        for server in range(num_servers):
            for key, place in zip(layout.held_by(server), layout.value_places(server)):
                for s in layout.segments(key):
                    if s.parameter == number:
                        start = place + 4 * (s.place - s.start)
                        assert Stand(server, start) == stand
