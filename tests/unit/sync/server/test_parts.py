"""Parts of a model on servers of their own: what they hold, and under which names and places."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.parallel.apply import Survey
from shoal.parallel.layout import Cut
from shoal.parallel.tensor.cutting import TensorPlan
from shoal.plans.plan import Plan
from shoal.sync.server.parts import PartOfModel, part_on_servers
from shoal.sync.server.shard import ServerShard, layout_of, served_parameters
from shoal.sync.state import MemorySource

PLAN = Plan.parse("data=2 tensor=2 sync=server servers=2")
CUTS = {"0.weight": Cut(0), "0.bias": Cut(0), "2.weight": Cut(1)}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def part(number: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, optimizer = make()
    survey = Survey(TensorPlan(CUTS, {}))
    held, holding = part_on_servers(model, optimizer, PLAN, survey, number)
    return held, optimizer, holding


@pytest.mark.parametrize("number", [0, 1])
def test_a_server_steps_on_its_part_of_each_matrix(number: int) -> None:
    held, optimizer, _ = part(number)
    whole, _ = make()
    named, true = dict(held.named_parameters()), dict(whole.named_parameters())
    assert list(named) == list(true)
    rows = slice(4 * number, 4 * number + 4)
    assert torch.equal(named["0.weight"], true["0.weight"][rows])
    assert torch.equal(named["2.weight"], true["2.weight"][:, rows])
    assert torch.equal(named["2.bias"], true["2.bias"])
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert stepped == {id(p) for p in named.values()}


def test_a_state_of_parts_is_that_of_the_whole_model() -> None:
    """What servers of both parts tell fits together, and each takes its part of it again."""
    shards = [shard_of(number) for number in range(2)]
    for shard in shards:
        step(shard)
    states = [shard.state_dict() for shard in shards]
    tensors = {
        name: [*parts, *states[1].tensors[name]] for name, parts in states[0].tensors.items()
    }
    whole, _ = make()
    for name, p in whole.named_parameters():
        for found in (tensors[f"model.{name}"], tensors[f"optimizer.{name}.exp_avg"]):
            assert {part.global_shape for part in found} == {tuple(p.shape)}
    covered = sum(part.tensor.numel() for part in tensors["model.0.weight"])
    assert covered == whole.get_parameter("0.weight").numel()
    again = shard_of(1)
    again.load_state_dict(MemorySource(states[0]._replace(tensors=tensors)))
    for (run, name), (other, _) in zip(named_runs(again), named_runs(shards[1]), strict=True):
        assert torch.equal(run, other), name
        kept = again.optimizer.state[run], shards[1].optimizer.state[other]
        assert torch.equal(kept[0]["exp_avg"], kept[1]["exp_avg"])


def test_a_plan_that_cuts_nothing_keeps_its_model() -> None:
    model, optimizer = make()
    plan = Plan.parse("data=4 replicas=2 sync=server")
    held, holding = part_on_servers(model, optimizer, plan, Survey(), 0)
    assert held is model and not holding.cuts


def test_only_what_is_trained_is_served() -> None:
    model, _ = make()
    first, second, *_ = model.parameters()
    second.requires_grad_(False)
    held = PartOfModel({"a": first, "b": second})
    assert [name for name, _ in served_parameters(held)] == ["a"]


def shard_of(number: int) -> ServerShard:
    held, optimizer, holding = part(number)
    return ServerShard(
        held, optimizer, layout_of(held, optimizer, 1), 0, shared=False, holding=holding
    )


def step(shard: ServerShard) -> None:
    sums = {key: torch.full_like(value, 0.5) for key, value in shard.values.items()}
    touched = {key: [True] * len(shard.layout.segments(key)) for key in shard.keys}
    shard.apply(sums, touched, 1.0, 1.0, [{"lr": 0.1}])


def named_runs(shard: ServerShard) -> list[tuple[Any, str]]:
    return [(run, own.name) for run, own in shard.runs.items()]
