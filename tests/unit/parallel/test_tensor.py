"""What can be cut of a model, found in one process without a group."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.errors import PlanError
from shoal.parallel.layout import Cut, part_of
from shoal.parallel.tensor.cutting import TensorPlan, cut_tensors, find_cuts, mark_cut_parameters
from shoal.parallel.tensor.part import TAG, joined, share_of
from shoal.parallel.tensor.view_rules import viewed


class Block(nn.Module):
    def __init__(self, heads: int = 4, width: int = 32):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Small(nn.Module):
    """A tied table and head around blocks."""

    def __init__(self, heads: int = 4, tokens: int = 64):
        super().__init__()
        self.embed = nn.Embedding(tokens, 32)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(2))
        self.head = nn.Linear(32, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def found(model: nn.Module, *inputs: Tensor, num_ranks: int = 2, **overrides: str) -> TensorPlan:
    named = {name.replace("__", "."): how for name, how in overrides.items()}
    return find_cuts(model, [lambda: model(*inputs)], num_ranks, named)


def text() -> Tensor:
    return torch.arange(24).reshape(3, 8)


def test_the_plan_of_a_transformer_appears_by_itself() -> None:
    model = Small()
    plan = found(model, text())
    assert plan.cuts["embed.weight"] == Cut(0)
    for i in range(2):
        assert plan.cuts[f"blocks.{i}.qkv.weight"] == Cut(0, 3)
        assert plan.cuts[f"blocks.{i}.qkv.bias"] == Cut(0, 3)
        assert plan.cuts[f"blocks.{i}.project.weight"] == Cut(1)
        assert plan.cuts[f"blocks.{i}.widen.weight"] == Cut(0)
        assert plan.cuts[f"blocks.{i}.narrow.weight"] == Cut(1)
    assert not any("norm" in name or name.endswith("project.bias") for name in plan.cuts)
    assert plan.share(model) > 0.98
    assert plan.whole == {}
    rows = {row.name: row for row in plan.table()}
    assert rows["blocks.0.qkv.weight"][1:] == ((96, 32), "dim 0 in 3 packs", "columns")


def test_heads_that_ranks_do_not_divide_are_refused_or_left_whole_on_purpose() -> None:
    model, tokens = Small(heads=2, tokens=64), torch.zeros(3, 8, dtype=torch.long)
    with pytest.raises(
        PlanError, match=r"tensor=4 does not divide 2 heads, in blocks\.0.*Use 1 or 2"
    ):
        found(model, tokens, num_ranks=4)
    plan = find_cuts(model, [lambda: model(tokens)], 4, {"blocks.*": "whole"})
    assert "blocks.0.qkv.weight" in plan.whole and "embed.weight" in plan.cuts


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 3, 3)
        self.norm, self.groups = nn.BatchNorm2d(32), nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.max_pool2d(self.groups(self.norm(self.first(x))).relu(), 2))


def test_statistics_of_cut_channels_are_cut_too() -> None:
    model = Channels()
    plan = found(model, torch.randn(2, 3, 12, 12))
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert plan.cuts[f"norm.{name}"] == Cut(0)
    assert plan.cuts["groups.weight"] == Cut(0)
    assert "norm.num_batches_tracked" not in plan.cuts
    cut_tensors(model, plan, 1, 2)
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.shape == (16,)
    assert model.second.weight.shape == (3, 16, 3, 3)
    assert plan.share(model) == found_share(plan, Channels())


def found_share(plan: TensorPlan, model: nn.Module) -> float:
    counts = {name: p.numel() for name, p in model.named_parameters()}
    return sum(n for name, n in counts.items() if name in plan.cuts) / sum(counts.values())


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(Channels(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(27, 64))
    inputs = torch.randn(2, 3, 12, 12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = [id(value) for value in (*model.parameters(), *model.buffers())]
    random, threads = torch.get_rng_state(), threading.active_count()
    plans = [found(model, inputs) for _ in range(2)]
    assert plans[0] == plans[1]
    assert list(plans[0].cuts) == list(plans[1].cuts)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(value) for value in (*model.parameters(), *model.buffers())] == objects
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert not dist.is_initialized()
    assert threading.active_count() == threads
    assert "shoal" not in torch.autograd.Function.apply.__module__


def test_parts_are_copies_under_the_same_names_and_tied_ones_stay_tied() -> None:
    model, whole = Small(), Small()
    model.load_state_dict(whole.state_dict())
    plan = found(model, text())
    cut_tensors(model, plan, 1, 2)
    assert model.head.weight is model.embed.weight
    expected = dict(whole.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        if name in plan.cuts:
            assert torch.equal(p, part_of(expected[name], plan.cuts[name], 1, 2))
            assert p.untyped_storage().nbytes() == p.nbytes


def test_parameters_put_in_place_later_can_be_tagged() -> None:
    model = Small()
    cut_tensors(model, found(model, text()), 0, 2)
    layer = model.blocks[0].qkv  # type: ignore[union-attr]
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # type: ignore[union-attr,operator]
    assert not hasattr(layer.weight, TAG)
    mark_cut_parameters(model.blocks[0])
    assert getattr(layer.weight, TAG).shape == (96, 32)


class Fanned(nn.Module):
    """Experts; the last is reached by no example."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x) + self.experts[1](x)


def test_what_no_example_reaches_is_cut_as_its_siblings_are() -> None:
    plan = found(Fanned(), torch.randn(4, 32))
    for name in ("0.weight", "0.bias", "2.weight"):
        assert plan.cuts[f"experts.2.{name}"] == plan.cuts[f"experts.0.{name}"]
    assert "experts.2.2.bias" not in plan.cuts


def test_overrides_are_followed() -> None:
    model = Small()
    plan = found(model, text(), **{"blocks.0.widen": "whole", "blocks.*.qkv": "whole"})
    assert plan.whole["blocks.0.widen.weight"] == "override blocks.0.widen=whole"
    assert "blocks.1.qkv.weight" in plan.whole
    assert plan.cuts["blocks.1.widen.weight"] == Cut(0)
    plan = found(
        model, text(), embed="whole", **{"blocks.0.project": "row", "blocks.0.qkv": "whole"}
    )
    assert plan.whole["embed.weight"] == "override embed=whole"
    assert plan.cuts["blocks.0.project.weight"] == Cut(1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"blocks.*.widn": "row"}, "Did you mean 'blocks.1.widen'"),
        ({"blocks.0.widen": "colum"}, "Did you mean 'column'"),
        ({"blocks.0.project": "column"}, "blocks.0.project.weight to be cut by columns"),
        ({"blocks.0.nothing.at.all": "row"}, "names no module"),
    ],
)
def test_overrides_that_cannot_be_followed_are_refused(
    overrides: dict[str, str], words: str
) -> None:
    with pytest.raises(PlanError, match=r"(?s)override") as refusal:
        found(Small(), text(), **overrides)
    assert words in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_an_override_of_what_has_no_rule_is_refused() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.head = nn.LSTM(32, 32), nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.read(x)[0])

    assert found(Reader(), torch.randn(3, 2, 32)).cuts["head.weight"] == Cut(0)
    with pytest.raises(PlanError, match="lstm cannot use parts"):
        found(Reader(), torch.randn(3, 2, 32), read="column")


def test_a_plan_of_the_models_own_is_followed_where_it_works() -> None:
    model = Small()
    model._tp_plan = {  # type: ignore[assignment]
        "blocks.*.widen": "colwise",
        "blocks.*.narrow": "rowwise",
        "blocks.*.project": "colwise",
    }
    plan = found(model, text())
    assert plan.cuts["blocks.0.widen.weight"] == Cut(0)
    assert plan.cuts["blocks.0.narrow.weight"] == Cut(1)
    assert plan.whole["blocks.0.project.weight"].startswith("the model's own plan says column, but")


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Between(nn.Module):
    """Two matrices with something between them."""

    def __init__(self, step: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.step = nn.Linear(32, 64), nn.Linear(64, 32), step

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.step(self.first(x)))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x: x.softmax(-1), "softmax is taken over the dim that is cut"),
        (lambda x: F.layer_norm(x, (64,)), "a norm is taken over the dim that is cut"),
        (lambda x: x * x.count_nonzero(), "count_nonzero has no rule for parts"),
        (lambda x: Cube.apply(x).sum(-1, keepdim=True) + x, "sum is taken over the dim"),
        (lambda x: x * torch.ones(3, 64), "its result meets a whole activation (a residual)"),
    ],
)
def test_what_cannot_be_cut_has_a_reason(step: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(PlanError) as refusal:
        found(Between(step), torch.randn(3, 32))
    assert f"first.weight: {reason}" in str(refusal.value)
    assert "Use another number of ranks" in str(refusal.value)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.relu().square() * 2 + 1,
        lambda x: x.unflatten(-1, (8, 8)).softmax(-1).flatten(-2),
        lambda x: x.view(3, 4, 16).transpose(1, 2)[:, :16].mT.reshape(3, 64),
        lambda x: torch.cat([x[:1], x[1:]]).clamp(min=0),
        lambda x: torch.where(x > 0, x, torch.zeros(())).to(torch.float64).float(),
        Cube.apply,
        lambda x: x.flip(-1),
        lambda x: torch.fft.fft(x).real,
        lambda x: torch.cat([torch.tensor([]), x, x])[:3],
        lambda x: x.repeat(1, 1).scatter(0, torch.zeros(1, 64).long(), 0.5),
        lambda x: x[torch.tensor([2, 1, 0])].unsqueeze(1).squeeze(1).movedim(0, 1).movedim(1, 0),
    ],
)
def test_what_works_on_parts_is_kept(step: Callable[[Tensor], Tensor]) -> None:
    plan = found(Between(step), torch.randn(3, 32))
    assert plan.cuts == {"first.weight": Cut(0), "first.bias": Cut(0), "second.weight": Cut(1)}


def test_a_model_that_fails_fails_as_it_would_alone() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        found(nn.Linear(32, 64), torch.randn(3, 31))


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@given(shape=shapes, new=shapes, data=st.data())
def test_a_view_of_parts_is_the_part_of_the_view(
    shape: list[int], new: list[int], data: st.DataObject
) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod()))
    rest, left = divmod(whole.numel(), int(torch.tensor(new).prod()))
    new = new if left else [*new, rest]
    if left:
        new = [whole.numel()]
    cut = Cut(data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 3)))
    if shape[cut.dim] % (2 * cut.packs):
        return
    after = viewed(shape, cut, 2, new)
    if after is None:
        return
    parts = [share_of(whole.view(shape), cut, rank, 2) for rank in range(2)]
    for rank, part in enumerate(parts):
        expected = share_of(whole.view(new), after, rank, 2)
        assert torch.equal(part.reshape(expected.shape), expected)
    assert torch.equal(joined(torch.stack(parts), cut), whole.view(shape))


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


def test_reentrant_checkpointing_inside_the_model_is_refused() -> None:
    with pytest.raises(PlanError, match="use_reentrant=True"):
        found(Recomputes(), torch.randn(4, 32, requires_grad=True))


class Wrapped(nn.Module):
    """Makes an error of its own of what is raised inside, as some libraries do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = self.inner(x)
        except Exception as error:
            raise ValueError("it failed") from error
        return out


def test_a_model_that_wraps_errors_is_cut_as_any_other() -> None:
    plan, wrapped = found(Small(), text()), found(Wrapped(Small()), text())
    assert wrapped.cuts == {f"inner.{name}": cut for name, cut in plan.cuts.items()}
    with pytest.raises(PlanError, match="use_reentrant=True"):
        found(Wrapped(Recomputes()), torch.randn(4, 32, requires_grad=True))
