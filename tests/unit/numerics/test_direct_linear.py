"""Gradients that are computed where they are wanted have the bits of autograd's own."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.numerics.direct_linear import DirectLinears

WIDTH = 260  # a weight is large enough to be written in place


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(F.gelu(self.twice(F.gelu(self.first(x)))))
        return self.last(x)


class Recomputed(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.last(F.gelu(x))


def places_of(model: nn.Module) -> dict[Tensor, Tensor]:
    return {p: torch.full_like(p, torch.nan).detach() for p in model.parameters()}


def loss_of(model: nn.Module, num_dims: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(*[2, 3, 4][4 - num_dims :], WIDTH, generator=draws, requires_grad=True)
    return model(x).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def same(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> bool:
    pairs = [(found[name], wanted[name]) for name in wanted]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", [Network, Recomputed])
@pytest.mark.parametrize("num_dims", [2, 3, 4])
def test_the_bits_are_autograds(kind: type[nn.Module], num_dims: int) -> None:
    torch.manual_seed(0)
    model = kind()
    plain, places = copy.deepcopy(model), places_of(model)
    linears = DirectLinears(model, places)
    linears.arm()
    loss_of(model, num_dims).backward()
    loss_of(plain, num_dims).backward()
    assert same(gradients(model), gradients(plain))
    assert model.last.weight.grad.data_ptr() == places[model.last.weight].data_ptr()
    twice = model.get_submodule("twice").weight
    assert twice.grad is None or twice.grad.data_ptr() != places[twice].data_ptr()


def test_a_piece_that_is_not_the_last_is_computed_as_ever() -> None:
    model = Network()
    plain, places = copy.deepcopy(model), places_of(model)
    linears = DirectLinears(model, places)
    for seed, is_last in enumerate((False, True)):
        (linears.arm if is_last else linears.begin)()
        loss_of(model, 2, seed).backward()
        loss_of(plain, 2, seed).backward()
    assert same(gradients(model), gradients(plain))  # added to what there was
    assert places[model.last.weight].isnan().all()


def test_a_graph_of_the_backward_is_kept_where_it_is_asked_for() -> None:
    model = Network()
    plain = copy.deepcopy(model)
    DirectLinears(model, places_of(model)).arm()
    for each in (model, plain):
        loss = loss_of(each, 2)
        (first,) = torch.autograd.grad(loss, [each.first.weight], create_graph=True)
        (loss + first.square().sum()).backward()
    for own, wanted in zip(gradients(model).values(), gradients(plain).values(), strict=True):
        torch.testing.assert_close(own, wanted)  # the graph of the graph adds in another order


def test_what_is_special_is_left_to_torch() -> None:
    model = Network()
    places = places_of(model)
    linears = DirectLinears(model, places)
    linears.arm()
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model, 2).backward()
    with torch.no_grad():
        loss_of(model, 2)
    assert all(place.isnan().all() for place in places.values())
    linears.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_weight_of_two_modules_and_a_layer_with_its_own_forward_are_left_alone() -> None:
    model = Network()
    model.unused.weight = model.first.weight
    model.last.forward = lambda x: x  # type: ignore[method-assign]
    DirectLinears(model, places_of(model))
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == ["twice", "last"]


def test_a_gradient_that_is_asked_for_twice_is_there_twice() -> None:
    """As losses are balanced by the norms of their gradients in the last layer."""
    layer = nn.Linear(256, 256)
    places = {layer.weight: torch.zeros(256, 256)}
    linears = DirectLinears(nn.Sequential(layer), places)
    linears.arm()
    y = layer(torch.randn(4, 256))
    one, other = (
        torch.autograd.grad(loss, layer.weight, retain_graph=True)[0]
        for loss in (y.sum(), 3 * y.sum())
    )
    torch.testing.assert_close(3 * one, other)
    linears.close()


def test_a_layer_computes_with_the_weight_that_it_has() -> None:
    layer, x = nn.Linear(256, 256), torch.randn(4, 256)
    linears = DirectLinears(nn.Sequential(layer), {layer.weight: torch.zeros(256, 256)})
    linears.arm()
    moved = {"weight": layer.weight + 1, "bias": layer.bias}
    found = torch.func.functional_call(layer, moved, (x,))
    assert found.equal(nn.functional.linear(x, moved["weight"], layer.bias))
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight.zero_()
    assert copied(x).equal(nn.functional.linear(x, copied.weight, copied.bias))
    linears.close()
