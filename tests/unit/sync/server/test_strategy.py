"""A worker's side with a real server at the other end of a socket."""

import pytest
import torch

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh, Servers
from shoal.sync.server.strategy import ServerStrategy
from shoal.sync.state import MemorySource, ParameterRun, ShardedState, TrainState
from shoal.sync.strategy import LocalStep
from tests.unit.sync.server.played import (
    GENERATION,
    SECRET,
    make_model,
    make_optimizer,
    make_server,
    opened,
)


def saved(rate: float, is_newcomer: bool) -> ShardedState:
    """What a run left in which a hook had changed the rate."""
    model = make_model()
    optimizer = make_optimizer(model, "adam")
    optimizer.param_groups[0]["lr"] = rate
    named = dict(model.named_parameters())
    runs = {} if is_newcomer else {p: ParameterRun(name, p.shape) for name, p in named.items()}
    return TrainState(named, optimizer, runs).state_dict()


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_a_rate_that_a_hook_changed_outlives_the_worker(is_newcomer: bool) -> None:
    """From a checkpoint, and from a peer."""
    server, model = make_server(kind="adam"), make_model()
    optimizer, strategy = make_optimizer(model, "adam"), ServerStrategy(1, 0)
    with opened(server) as loop:
        servers = Servers((loop.address,), GENERATION, SECRET, lambda: False)
        mesh = Mesh(Group(), Group(), Group(), Group(), "cpu", servers=servers)
        strategy.attach(model, optimizer, mesh)
        try:
            load = strategy.join if is_newcomer else strategy.load_state_dict
            load(MemorySource(saved(0.25, is_newcomer)), 0)
            assert optimizer.param_groups[0]["lr"] == 0.25
            state = strategy.newcomer_state() if is_newcomer else strategy.state_dict()
            told = state.plain["groups"]
            assert ["lr", 0.25] in told["list"][0]["dict"]
            with strategy.microbatch(True, True):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
            local = LocalStep()
            local.add(torch.tensor(1.0), 1.0, True)
            strategy.exchange(local, want_norm=False)
            strategy.update(1.0, check=False)
        finally:
            strategy.detach()
    assert server.shard.optimizer.param_groups[0]["lr"] == 0.25


def test_one_that_was_never_attached_has_nothing_to_let_go() -> None:
    """A newcomer may lose its first group before it has reached a server."""
    ServerStrategy(1, 0).detach()
