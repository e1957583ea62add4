"""Runs that begin with trained weights: what is taken, frozen, replaced, and how fast it learns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal import logs
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.plans.plan import Plan
from shoal.slim import adapt
from shoal.training.run import make_batches
from shoal.verify import reference


class Model(nn.Module):
    def __init__(self, kinds: int = 4):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def small(kinds: int = 4, optimizer: Callable[[Any], Any] = adam) -> shoal.Run:
    generator = torch.Generator().manual_seed(3)
    return shoal.Run(
        model=lambda: Model(kinds),
        loss=F.cross_entropy,
        optimizer=optimizer,
        data=shoal.data.tensors(torch.randn(32, 6, generator=generator), torch.arange(32) % kinds),
        batch_size=8,
        steps=5,
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = replace(small(), seed=9).make_model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def said() -> str:
    found = "\n".join(logs.for_the_screen)
    logs.for_the_screen.clear()
    return found


def test_a_run_begins_with_weights(weights: Path) -> None:
    said()
    model = adapt(small(), begin_from=weights).make_model()
    expected = replace(small(), seed=9).make_model()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
    assert not said()


def test_what_does_not_match_is_left_out_and_said(weights: Path) -> None:
    said()
    model = adapt(small(kinds=3), begin_from=weights).make_model()
    fresh, trained = small(kinds=3).make_model(), replace(small(), seed=9).make_model()
    assert torch.equal(model.head.weight, fresh.head.weight)  # type: ignore[union-attr]
    assert torch.equal(model.embed.weight, trained.embed.weight)  # type: ignore[union-attr]
    assert "left out (of another shape: head.bias, head.weight)" in said()


def test_a_new_head_is_the_seeds_even_if_one_would_fit(weights: Path) -> None:
    said()
    run = adapt(small(), begin_from=weights, head={"head": lambda: nn.Linear(8, 4)})
    model, again = run.make_model(), run.make_model()
    trained = replace(small(), seed=9).make_model()
    assert torch.equal(model.head.weight, again.head.weight)  # type: ignore[union-attr]
    assert not torch.equal(model.head.weight, trained.head.weight)  # type: ignore[union-attr]
    assert torch.equal(model.embed.weight, trained.embed.weight)  # type: ignore[union-attr]
    assert not said()
    other = replace(run, seed=5).make_model()
    assert not torch.equal(model.head.weight, other.head.weight)  # type: ignore[union-attr]


def test_names_may_differ_by_a_prefix(weights: Path) -> None:
    def inside() -> nn.Module:
        return nn.ModuleDict({"net": Model()})

    model = adapt(replace(small(), model=inside), begin_from=weights).make_model()
    trained = replace(small(), seed=9).make_model()
    assert torch.equal(model.get_parameter("net.embed.weight"), trained.embed.weight)  # type: ignore[arg-type, union-attr]


def test_frozen_parts_are_not_trained() -> None:
    model = adapt(small(), freeze=["embed", "layers.*.bias"]).make_model()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"layers.0.weight", "layers.1.weight", "head.weight", "head.bias"}


def test_groups_of_the_recipe_are_split_by_factors() -> None:
    def grouped(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        matrices = [pair for pair in pairs if pair[1].dim() > 1]
        vectors = [pair for pair in pairs if pair[1].dim() == 1]
        return torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1
        )

    run = adapt(small(optimizer=grouped), rates={"head": 10.0}, layer_decay=0.5)
    optimizer = run.make_optimizer(run.make_model())
    found = [
        (group["param_names"], pytest.approx(group["lr"]), group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        (["head.weight"], 1.0, 0.01),
        (["layers.1.weight"], 0.05, 0.01),
        (["layers.0.weight"], 0.025, 0.01),
        (["embed.weight"], 0.0125, 0.01),
        (["head.bias"], 1.0, 0.0),
        (["layers.1.bias"], 0.05, 0.0),
        (["layers.0.bias"], 0.025, 0.0),
        (["embed.bias"], 0.0125, 0.0),
    ]
    assert all(group["fused"] for group in optimizer.param_groups)


def test_layers_count_even_if_they_are_frozen() -> None:
    run = adapt(small(), freeze=["head", "layers.1"], layer_decay=0.5)
    optimizer = run.make_optimizer(run.make_model())
    assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.00125]


def test_optimizers_of_several_are_split_too() -> None:
    def several(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        return shoal.Optimizers(
            torch.optim.AdamW(pairs[:4], lr=0.1), torch.optim.SGD(pairs[4:], lr=0.2)
        )

    run = adapt(small(optimizer=several), rates={"*.bias": 0.5})
    optimizer = run.make_optimizer(run.make_model())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05, 0.2, 0.1]
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    optimizer.step()
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    moved = (before[-1] - after[-1]).detach()  # a bias, by SGD
    assert torch.allclose(moved, torch.full_like(moved, 0.1))


def test_it_trains_what_a_plain_loop_does(weights: Path) -> None:
    """Freezing, factors and a schedule, against torch alone."""
    run = adapt(
        replace(small(), schedule=lambda step, steps: 1 - step / steps),
        begin_from=weights,
        freeze=["embed"],
        layer_decay=0.5,
    )
    *_, (last,) = reference.train(run, Plan.parse("data=1").resolve(ranks=1, cores=1, batch_size=8))

    torch.manual_seed(0)
    model = replace(small(), seed=9).make_model().train()
    model.embed.requires_grad_(False)  # type: ignore[operator, union-attr]
    groups: list[dict[str, Any]] = [
        {"params": list(model.get_submodule(name).parameters()), "lr": 0.01 * factor}
        for name, factor in (("head", 1.0), ("layers.1", 0.5), ("layers.0", 0.25))
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = make_batches(small(), 1)
    for step in range(5):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / 5)
        piece = batches.at(step).piece(0)
        optimizer.zero_grad()
        F.cross_entropy(model(piece.inputs), piece.target).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(last.weights[name], p, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"freeze": ["embedd"]}, r"freeze: 'embedd' matches no parameter\. .*'embed'\?"),
        ({"freeze": "embed"}, r"freeze is a list of name patterns\. Write freeze=\['embed'\]"),
        ({"freeze": ["*"]}, "leaves nothing to train"),
        ({"rates": {"heda": 2.0}}, r"rates: 'heda' matches no parameter\. .*'head'\?"),
        ({"rates": {"head": 0.0}}, "is no factor of a learning rate"),
        ({"rates": {"embed": 0.5}, "freeze": ["embed"]}, "only parameters that are frozen"),
        ({"layer_decay": 2}, "must be above 0 and at most 1"),
        ({"head": {"haed": lambda: nn.Linear(8, 2)}}, r"no module 'haed'\. .*'head'\?"),
        ({"head": {"head": nn.Linear(8, 2)}}, "Give a function that makes it"),
        ({"head": {"head": lambda: 3}}, "made a int, not an nn.Module"),
        ({"begin_from": "no/such/place"}, "no/such/place"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        adapt(small(), **arguments).make_model()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file({"other.weight": torch.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="have no tensor in common"):
        adapt(small(), begin_from=tmp_path / "x.safetensors").make_model()
    save_file({"layers.0.lora_A.default.weight": torch.zeros(3)}, tmp_path / "y.safetensors")
    with pytest.raises(UsageError, match=r"with LoRA adapters, .* --merge"):
        adapt(small(), begin_from=tmp_path / "y.safetensors").make_model()


def test_damaged_weights_are_refused(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ShoalError, match=r"model\.safetensors"):
        adapt(small(), begin_from=weights).make_model()


def test_an_optimizer_without_a_rate_has_no_factors() -> None:
    run = adapt(small(optimizer=lambda named: Rateless(named)), rates={"head": 2.0})
    with pytest.raises(RecipeError, match="no learning rate that a factor could change"):
        run.make_optimizer(run.make_model())


class Rateless(torch.optim.Optimizer):
    def __init__(self, named: Any):
        super().__init__(named, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_records_name_how_a_run_was_adapted(weights: Path) -> None:
    run = adapt(small(), begin_from=weights, freeze=["embed"], layer_decay=0.5)
    assert getattr(run.model, "__qualname__", "").endswith(
        f"with begin_from={weights} freeze=embed"
    )
    assert getattr(run.optimizer, "__qualname__", "") == "adam with layer_decay=0.5"
