"""Where the memory of a host has everything, and steps on parts of it."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from shoal.comm.mesh import Mesh
from shoal.comm.tree import Block
from shoal.numerics.fused_steps import Runs, begin_count, count_of, step_groups, why_not_in_runs
from shoal.sync.host_state import CHUNK, HostState, MemoryLayout, why_apart
from shoal.testing.ranks import Pool

LENGTHS = [1, 7, 1024, 3 * CHUNK + 5, 65, 2_000_003]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_element_is_of_one_rank_and_in_one_chunk(num_ranks: int) -> None:
    blocks = [[Block(rank, 1)] for rank in range(num_ranks)]
    layout = MemoryLayout.of(LENGTHS, 2, blocks)
    owned = [0] * len(LENGTHS)
    for rank in range(num_ranks):
        chunks = layout.chunks(rank)
        assert all(0 < chunk.stop - chunk.start <= CHUNK for chunk in chunks)
        in_chunks = [at for chunk in chunks for at in chunk.runs()]
        for segment in layout.segments(rank):
            owned[segment.parameter] += segment.length
            own = [at for number, at in in_chunks if number == segment.parameter]
            assert sum(at.stop - at.start for at in own) == segment.length
            for at in own:  # kernels treat what is no multiple of 16 apart
                assert (at.start - segment.place) % 16 == segment.start % 16 == 0
    assert owned == LENGTHS
    assert layout.num_rows == 1 + 2 + num_ranks


def test_rows_are_added_in_the_order_of_the_tree() -> None:
    layout = MemoryLayout.of([10], 0, [[Block(0, 2), Block(2, 1)], [Block(3, 1)], [Block(4, 1)]])
    assert layout.sum() == ((1, (2, 3)), 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda named: AdamW(named, lr=1e-2),
        lambda named: Adam(named, lr=1e-2, weight_decay=0.1, maximize=True),
        lambda named: SGD(named, lr=1e-2),
        lambda named: SGD(named, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda named: SGD(named, lr=1e-2, momentum=0.9, dampening=0.5),
    ],
)
def test_a_step_on_runs_has_the_bits_of_the_optimizer(make: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(61, 17)
    other, cut = copy.deepcopy(model), 1024
    whole, parts = make(model.parameters()), make(other.parameters())
    for optimizer in (whole, parts):
        optimizer.param_groups[0].update(fused=True, foreach=False)
    assert not why_not_in_runs(parts)
    groups = step_groups(parts)
    for number in range(3):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad, group, state = torch.randn_like(p), groups[q], parts.state[q]
            if not number:
                if group.counts:
                    begin_count(state)
                state.update({key: torch.zeros_like(q) for key in group.keys})
            if group.counts:
                count_of(state).add_(1)
            gradient = p.grad.flatten()
            for at in (slice(0, cut), slice(cut, q.numel())):
                if at.start < q.numel():
                    kept = [[state[key].view(-1)[at]] for key in group.keys]
                    counts = [count_of(state)] if group.counts else []
                    runs = Runs([q.detach().view(-1)[at]], [gradient[at]], kept, counts)
                    group.step(runs, is_first=not number)
        whole.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key in groups[q].keys:
            assert torch.equal(whole.state[p][key], parts.state[q][key])


def test_what_cannot_be_shared_is_named() -> None:
    model = nn.Linear(4, 4)
    fused = {"fused": True}
    assert why_apart(model, AdamW(model.parameters(), **fused)) == ""
    assert "AdamW" not in why_apart(model, AdamW(model.parameters(), amsgrad=True, **fused))
    assert "amsgrad" in why_apart(model, AdamW(model.parameters(), amsgrad=True, **fused))
    assert "RMSprop is none of" in why_apart(model, torch.optim.RMSprop(model.parameters()))
    assert "not fused" in why_apart(model, SGD(model.parameters(), lr=0.1, foreach=True))
    watched = SGD(model.parameters(), lr=0.1, **fused)
    watched.register_step_post_hook(lambda *_: None)
    assert "hooks" in why_apart(model, watched)
    assert "weight is not of float32" in why_apart(model.double(), AdamW(model.parameters()))
    viewed = nn.ParameterList([nn.Parameter(torch.zeros(8))])
    viewed.append(nn.Parameter(viewed[0].data[2:4]))
    assert "views of one another" in why_apart(viewed, AdamW(viewed.parameters(), **fused))


def test_a_buffer_without_memory_of_its_own_is_no_view() -> None:
    """As a quantised weight has none: it is made of other tensors."""
    model = nn.Linear(4, 4)
    model.register_buffer("empty", torch.zeros(4, device="meta"))
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    assert why_apart(model, AdamW(model.parameters(), fused=True)) == ""
    model.register_buffer("view", model.weight.data[1:])
    assert "view is a view" in why_apart(model, AdamW(model.parameters(), fused=True))


def test_a_gradient_changes_no_version_of_the_state_beside_it(pool: Pool) -> None:
    """A save refuses state whose version has changed since it began."""
    assert pool.run(versions_beside_gradients, 2) == [True, True]


def versions_beside_gradients(mesh: Mesh) -> bool:
    model = nn.Linear(3, 2)
    optimizer, blocks = Adam(model.parameters()), [[Block(rank, 1)] for rank in range(2)]
    host = HostState.make(mesh.world, model, optimizer, dict(model.named_parameters()), blocks)
    assert host is not None
    host.settle()
    host.agreed([True, True])
    host.step(1.0, keeps=False)
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    held = [*model.parameters(), *state]
    versions = [tensor._version for tensor in held]
    for row in host.gradient_rows(0):
        row.zero_()
    host.leave()
    return len(state) == 6 and versions == [tensor._version for tensor in held]
