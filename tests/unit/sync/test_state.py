"""State by canonical names: a round trip continues with the same bits."""

import pytest
import torch
from torch import nn

from shoal.comm.collectives import Group
from shoal.errors import RecipeError, UsageError
from shoal.parallel.layout import whole_slice
from shoal.sync.state import MemorySource, ParameterRun, TrainState


def made(seed: int, kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    return model, kind(model.named_parameters(), lr=0.01)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    runs = {p: ParameterRun(name, p.shape) for name, p in model.named_parameters()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return TrainState(tensors, optimizer, runs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_a_round_trip_continues_with_the_same_bits(kind) -> None:
    first = made(0, kind)
    train(*first, range(3))
    second = made(1, kind)
    held(*second).load_state_dict(MemorySource(held(*first).state_dict()))
    for pair in (first, second):
        train(*pair, range(3, 6))
    ends = [held(*pair).state_dict() for pair in (first, second)]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    assert ends[0].plain == ends[1].plain
    for name, (mine,) in ends[0].tensors.items():
        assert torch.equal(mine.tensor, ends[1].tensors[name][0].tensor), name


def test_names_are_canonical() -> None:
    model, optimizer = made(0, torch.optim.AdamW)
    train(model, optimizer, range(1))
    names = held(model, optimizer).state_dict().tensors.keys()
    assert {"model.0.weight", "model.1.running_mean", "model.scalar"} <= names
    assert {"optimizer.0.weight.exp_avg", "optimizer.2.bias.step"} <= names


def test_a_whole_tensor_knows_its_place() -> None:
    part = whole_slice(torch.zeros(2, 3, requires_grad=True))
    assert (part.global_shape, part.offset) == ((2, 3), (0, 0))
    assert not part.tensor.requires_grad


def test_a_group_of_one_gathers_its_own() -> None:
    assert Group().all_gather_numbers([1.0, 2.0]) == [[1.0, 2.0]]


class Remembers(torch.optim.SGD):
    """Keeps what it likes in its groups, and lists in its state, as some optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                kept = self.state[p].setdefault("kept", {"last": [], "place": (0, "a", None)})
                kept["last"] = [*kept["last"], p.grad.clone()][-2:]
                group["lr"] = 0.01 / group["seen"] + 1e-3 * len(kept["last"])
        return super().step(closure)


def test_groups_and_nested_state_are_carried() -> None:
    test_a_round_trip_continues_with_the_same_bits(Remembers)


def test_what_cannot_be_handed_over_is_refused_by_name() -> None:
    model, optimizer = made(0, torch.optim.SGD)
    optimizer.param_groups[0]["own"] = object()
    with pytest.raises(RecipeError, match=r"SGD keeps a object in groups\.0\.own"):
        held(model, optimizer).state_dict()


def test_another_optimizers_state_is_refused() -> None:
    first = made(0, torch.optim.SGD)
    train(*first, range(1))
    state = MemorySource(held(*first).state_dict())
    with pytest.raises(UsageError, match=r"optimizer SGD with 1 groups .* this is AdamW with 1"):
        held(*made(0, torch.optim.AdamW)).load_state_dict(state)
    model, _ = made(0, torch.optim.SGD)
    one, *rest = model.parameters()
    groups = torch.optim.SGD([{"params": [one]}, {"params": rest}], lr=0.1)
    with pytest.raises(UsageError, match="this is SGD with 2"):
        held(model, groups).load_state_dict(state)
