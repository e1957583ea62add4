"""Blocks that are run again in backward: the same numbers, statistics once, less memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.recompute import RecomputeContext, blocks_to_recompute, recompute

WIDTH = 16


def block(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), *more, nn.Linear(4 * WIDTH, WIDTH))


def made(*more: Callable[[], nn.Module], again: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(block(*(make() for make in more)) for _ in range(4)))
    if again:
        recompute(blocks_to_recompute(model), RecomputeContext())
    return model


def trained(model: nn.Module) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """The state after two forwards and backwards, and the gradients."""
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(8, WIDTH)).square().mean().backward()
    return model.state_dict(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "more",
    [
        (nn.Tanh,),
        (nn.ReLU, lambda: nn.Dropout(0.5)),
        (lambda: nn.BatchNorm1d(4 * WIDTH), nn.ReLU),
    ],
    ids=["tanh", "dropout", "BatchNorm"],
)
def test_numbers_masks_and_statistics_are_the_same(more) -> None:
    state, gradients = trained(made(*more, again=False))
    state_again, gradients_again = trained(made(*more, again=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert state.keys() == state_again.keys()
    for name, value in state.items():
        assert torch.equal(value, state_again[name]), name
    if "0.1.num_batches_tracked" in state:
        assert state_again["0.1.num_batches_tracked"] == 2


class Counts(nn.Module):
    """Computes with a counter of its calls, as a schedule in a model does."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * int(self.calls)


def test_a_buffer_has_its_first_value_in_the_second_run() -> None:
    state, gradients = trained(made(Counts, again=False))
    state_again, gradients_again = trained(made(Counts, again=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert state["0.1.calls"] == state_again["0.1.calls"] == 2


class Wraps(nn.Module):
    """Catches whatever is raised inside, as libraries that compile an operation do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4 * WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = self.inner(x).tanh()
        except Exception as error:
            raise ValueError("it failed") from error
        return out


def test_a_second_run_raises_nothing_through_a_block() -> None:
    """Its last operation is where torch would have all that backward needs."""

    def model(again: bool) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), Wraps()))
        if again:
            recompute(blocks_to_recompute(made), RecomputeContext())
        return made

    pairs = zip(trained(model(again=False))[1], trained(model(again=True))[1], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class Kept:
    """A cache: what blocks before this one have seen."""

    def __init__(self) -> None:
        self.layers: list[Kept] = []
        self.by_name: dict[str, Tensor] = {}
        self.seen: Tensor | None = None
        self.num_seen = 0


class Remembers(nn.Module):
    """Writes to what it is given, in every way that a cache may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        self.num_calls += 1
        before, self.last = getattr(self, "last", 0.0), x.detach().mean()
        x = self.inner(x).tanh() * self.num_calls + before
        kept.seen = x if kept.seen is None else torch.cat([kept.seen, x])
        kept.layers.append(Kept())
        kept.layers[0].num_seen += 1
        kept.by_name[str(len(kept.layers))] = x
        mixed: Tensor = x * kept.seen.mean() * kept.layers[0].num_seen * len(kept.by_name)
        return mixed


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = Kept()
        for block in self.blocks:
            x = block(x, kept=kept)
        assert len(kept.layers) == len(kept.by_name) == kept.layers[0].num_seen == 3
        return x


def test_a_cache_is_written_once() -> None:
    def gradients(again: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Remembered()
        if again:
            recompute(blocks_to_recompute(model), RecomputeContext())
        found = trained(model)[1]
        assert [block.num_calls for block in model.blocks] == [2, 2, 2]
        return found

    pairs = zip(gradients(False), gradients(True), strict=True)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


class Pairs(nn.Module):
    """A list of lists, none of which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([block(nn.Tanh()), block(nn.Tanh())]) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:
            x = x + second(first(x))
        return x


def test_the_members_of_lists_in_lists_are_blocks() -> None:
    model = Pairs()
    assert blocks_to_recompute(model) == [part for pair in model.layers for part in pair]
    whole = saved_bytes(model)
    recompute(blocks_to_recompute(model), RecomputeContext())
    assert saved_bytes(model) < whole / 2


def saved_bytes(model: nn.Module) -> int:
    """What a forward keeps for its backward, parameters left out."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.ones(64, WIDTH, requires_grad=True))
    assert output.requires_grad
    return sum(kept.values())


def test_a_forward_keeps_less() -> None:
    whole, again = (saved_bytes(made(nn.Tanh, nn.Tanh, again=again)) for again in (False, True))
    assert again < whole / 4


def test_evaluation_is_left_alone() -> None:
    model, plain = made(nn.Tanh, again=True), made(nn.Tanh, again=False)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))


def test_blocks_of_several_modules_are_preferred() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert mixed[2] in blocks_to_recompute(mixed) and mixed[0] not in blocks_to_recompute(mixed)
    flat = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert blocks_to_recompute(flat) == [flat[0], flat[2]]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Flatten())])
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"finds no blocks in this model.*Leave recompute out\."):
        blocks_to_recompute(model)
