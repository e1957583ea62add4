"""A model whose matrices are cut over ranks trains as the uncut one: unlike models, real Gloo."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from shoal.comm.mesh import Mesh
from shoal.errors import RecipeError
from shoal.parallel.layout import Cut, part_of
from shoal.parallel.tensor.cutting import (
    TensorForward,
    TensorPlan,
    cut_tensors,
    find_cuts,
    mark_cut_parameters,
)
from shoal.parallel.tensor.part import share_of
from shoal.testing.ranks import Pool
from tests import zoo

ZOO = [*zoo.TEN, "encoder", "frozen", "t5", "bart", "convnext"]
LEAST_CUT = dict.fromkeys(("mlp", "gpt", "gpt2", "llama", "bert"), 0.9)
LEAST_OF_FAMILIES = 0.87  # their tables are not looked up, and positions stay whole
NUM_STEPS = 3


class ByHand(nn.Module):
    """Products with parameters and views of them, without a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(64, 32) / 8)
        self.narrow = nn.Parameter(torch.randn(32, 64) / 8)
        self.heads = nn.Parameter(torch.randn(32, 4, 8) / 8)
        self.mixed = nn.Parameter(torch.randn(4, 8, 32) / 8)
        self.experts = nn.Parameter(torch.randn(4, 64, 32) / 8)
        self.back = nn.Parameter(torch.randn(4, 64, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(x @ self.wide.T) @ self.narrow.T
        inner = torch.einsum("btm,mhd->bthd", x, self.heads).tanh()
        x = x + torch.einsum("bthd,hdm->btm", inner, self.mixed)
        for expert in range(4):
            x = x + F.linear(x, self.experts[expert]).sigmoid() @ self.back[expert]
        return x


class Dropping(nn.Module):
    """Dropout on parts in every form: elements, channels, and the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.3, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)
        self.conv, self.unconv = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        crossed = self.attention(x, x.flip(1), x.flip(1), need_weights=False)[0]
        x = x + self.narrow(F.dropout(F.gelu(self.wide(x + crossed)), 0.4, self.training))
        image = x.unflatten(1, (8, -1)).flatten(2).unflatten(2, (4, -1))
        return self.unconv(F.dropout2d(self.conv(image).relu(), 0.5, self.training))


class Packed(nn.Module):
    """Gates in halves, channels one by one, and what no rule knows: gathered, never wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.out = nn.Linear(32, 128), nn.Linear(64, 32)
        self.spread, self.gather = nn.Conv1d(32, 64, 1), nn.Conv1d(64, 32, 1)
        self.each = nn.Conv1d(64, 64, 3, padding=1, groups=64)
        self.norm = nn.BatchNorm1d(64)
        self.both, self.sorted = nn.Linear(32, 64), nn.Linear(64, 32)
        self.strange = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(F.glu(self.gated(x)))
        x = x + self.gather(self.norm(self.each(self.spread(x.mT)))).mT
        inner = self.both(x)
        if self.strange:  # not in the forward that was looked at
            inner = inner.sort(-1).values.roll(1, -1)
            inner[..., :3] = 0.5
            inner = inner + self.both.weight.sum() * self.both.weight.norm(dim=1)
        return x + self.sorted(inner)


class InPlace(nn.Module):
    """Values that are changed after matrices have read them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](F.relu(self.layers[0](x), inplace=True))
        x.relu_()
        mean = x.mean(-1, keepdim=True)
        inner = self.layers[2](x) + mean
        mean += 1  # added again below, as another value under the same name
        inner = self.layers[3](inner + mean)
        inner *= 0.5
        inner[:, :2].mul_(3)
        return self.layers[5](self.layers[4](inner).tanh_())


class Padded(nn.Module):
    """A model of transformers as it is by default: with a cache, dropout, and a mask of bools."""

    def __init__(self, family: str, **config: Any) -> None:
        super().__init__()
        import transformers

        sizes: Any = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
        sizes |= {"vocab_size": 8, "pad_token_id": 0}
        made = getattr(transformers, f"{family}Config")(**sizes, **config)
        self.model = getattr(transformers, f"{family}Model")(made)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0])[:, None] % 4 + 5
        mask = torch.arange(x.shape[1])[None] < lengths
        hidden: Tensor = self.model(inputs_embeds=x, attention_mask=mask).last_hidden_state
        return hidden * mask.unsqueeze(-1)


def padded(family: str, **config: Any) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return partial(Padded, family, **config), (4, 8, 32)


WIDE: Any = {"intermediate_size": 64}
FEWER: Any = {**WIDE, "num_key_value_heads": 2, "attention_dropout": 0.1}
DISTANT: Any = {**WIDE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
FAMILIES = {
    "cached": padded("Llama", **FEWER),
    "padded": padded("Bert", **WIDE, max_position_embeddings=16),
    "uneven": padded("Phi3", **FEWER),
    "own function": padded("Bloom", hidden_dropout=0.1, attention_dropout=0.1),
    "distances": padded("Deberta", **DISTANT, max_position_embeddings=16),
}

OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "by hand": (ByHand, (4, 8, 32)),
    "dropping": (Dropping, (4, 8, 32)),
    "packed": (Packed, (4, 8, 32)),
    "in place": (InPlace, (4, 8, 32)),
    **FAMILIES,
}


class Subject:
    """A model twice, whole and cut, with the same inputs for both."""

    def __init__(self, mesh: Mesh, name: str, dtype: torch.dtype = torch.float32):
        self.name, self.dtype, self.rank, self.num_ranks = name, dtype, mesh.rank, mesh.num_ranks
        self.run = None if name in OWN else getattr(zoo, name)()
        self.whole, self.cut = self.make(), self.make()
        example = self.batch(0)[0]
        self.plan: TensorPlan = find_cuts(
            self.cut, [lambda: self.call(self.cut, example)], self.num_ranks
        )
        cut_tensors(self.cut, self.plan, self.rank, self.num_ranks)
        self.device_mesh: DeviceMesh = init_device_mesh("cpu", (self.num_ranks,))
        self.mode = TensorForward(self.device_mesh)

    def make(self) -> nn.Module:
        torch.manual_seed(1)
        model: nn.Module = OWN[self.name][0]() if self.run is None else self.run.model()
        return model.to(self.dtype).train()

    def batch(self, step: int) -> tuple[Any, Any]:
        if self.run is None:
            draws = torch.Generator().manual_seed(step)
            return torch.randn(*OWN[self.name][1], generator=draws).to(self.dtype), None
        inputs, target = default_collate([self.run.data[4 * step + i] for i in range(4)])
        return tree_map(self._typed, (inputs, target))  # type: ignore[no-any-return]

    def _typed(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value

    def call(self, model: nn.Module, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        return output.square().mean() if self.run is None else self.run.loss(output, target)

    def losses(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.batch(step)
        torch.manual_seed(step)
        with self.mode:
            cut = self.mode.whole(self.call(self.cut, inputs))
        torch.manual_seed(step)
        whole = self.call(self.whole, inputs)
        return self.loss(cut, target), self.loss(whole, target)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if self.run is None:
            return torch.optim.SGD(named, lr=0.1)
        optimizer: torch.optim.Optimizer = self.run.optimizer(named)
        return optimizer

    def worst(self, of: Callable[[Tensor], Tensor | None] = lambda t: t.detach()) -> float:
        """The largest difference between what is cut and the same part of the whole."""
        found, expected = state(self.cut), state(self.whole)
        worst = torch.zeros(())
        for name, value in found.items():
            mine, theirs = of(value), of(expected[name])
            assert (mine is None) == (theirs is None), name
            if mine is not None and theirs is not None:
                if name in self.plan.cuts:
                    theirs = part_of(theirs, self.plan.cuts[name], self.rank, self.num_ranks)
                assert mine.shape == theirs.shape, name
                # A difference that is not a number counts as the largest.
                worst = torch.maximum(worst, (mine - theirs).abs().max().float())
        return float(worst)


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def train(mesh: Mesh, name: str, dtype: str = "float64") -> dict[str, float]:
    subject = Subject(mesh, name, getattr(torch, dtype))
    optimizers = [subject.optimizer(model) for model in (subject.cut, subject.whole)]
    worst_loss = worst_gradient = 0.0
    for step in range(NUM_STEPS):
        losses = subject.losses(step)
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
        worst_loss = max(worst_loss, abs(losses[0].item() - losses[1].item()))
        worst_gradient = max(worst_gradient, subject.worst(lambda t: t.grad))
        for optimizer in optimizers:
            optimizer.step()
    held = sum(p.numel() for p in subject.cut.parameters())
    count = sum(p.numel() for p in subject.whole.parameters())
    return {
        "loss": worst_loss,
        "gradient": worst_gradient,
        "weight": subject.worst(),
        "share": subject.plan.share(subject.cut),
        "held": held / count,
    }


def worst_of(figures: dict[str, float]) -> float:
    return max(figures["loss"], figures["gradient"], figures["weight"])


@pytest.mark.quick(
    "mlp",
    "lstm",
    "gpt",
    "moe",
    "encoder",
    "convnext",
    "by hand",
    "dropping",
    "packed",
    "in place",
    "cached",
    "padded",
    "uneven",
    "own function",
    "distances",
)
@pytest.mark.parametrize("name", [*ZOO, *OWN])
def test_a_cut_model_trains_as_the_whole_one(pool: Pool, name: str) -> None:
    """In fp64, where nothing but rounding may differ."""
    for figures in pool.run(train, 2, name):
        assert worst_of(figures) < 1e-10, figures
        least = LEAST_OF_FAMILIES if name in FAMILIES else LEAST_CUT.get(name, 0.0)
        assert figures["share"] >= least, figures
        assert abs(figures["held"] - (1 - figures["share"] / 2)) < 1e-6, figures


@pytest.mark.quick("mlp", "gpt")
@pytest.mark.parametrize("name", LEAST_CUT)
def test_in_fp32_it_does_so_up_to_rounding(pool: Pool, name: str) -> None:
    for figures in pool.run(train, 2, name, "float32"):
        assert worst_of(figures) < 1e-5, figures


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.full), "gpt", "dropping"])
def test_four_ranks_as_well(pool: Pool, name: str) -> None:
    """Llama's two heads of keys stay whole: its queries are cut all the same."""
    for figures in pool.run(train, 4, name):
        assert worst_of(figures) < 1e-10, figures
        assert figures["share"] > 0.75, figures


def whole_gradients(mesh: Mesh, name: str) -> dict[str, Tensor]:
    subject = Subject(mesh, name)
    subject.losses(0)[0].backward()
    named = subject.cut.named_parameters()
    return {n: p.grad for n, p in named if n not in subject.plan.cuts and p.grad is not None}


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_whole_parameters_have_the_same_bits_on_every_rank(pool: Pool, name: str) -> None:
    first, second = pool.run(whole_gradients, 2, name)
    assert first.keys() == second.keys()
    assert first
    assert all(torch.equal(first[n], second[n]) for n in first)


def masks(mesh: Mesh) -> list[bool]:
    """Whether dropout on parts leaves the numbers, and the generator, that it leaves on wholes."""
    mode = TensorForward(mesh.data)
    flat, turned = torch.randn(2, 4, 6, 8), torch.randn(2, 8, 6, 4).transpose(1, 3)
    alike = []
    for whole, cut, drop in (
        (flat, Cut(1), F.dropout),
        (flat, Cut(3, 2), F.dropout),
        (turned, Cut(1), F.dropout),
        (turned, Cut(3), F.dropout),
        (flat, Cut(1), F.dropout2d),
    ):
        torch.manual_seed(3)
        expected = part_of(drop(whole, 0.4), cut, mesh.rank, mesh.num_ranks)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        with mode:
            part = mode.region.part(share_of(whole, cut, mesh.rank, mesh.num_ranks), cut)
            found = drop(part, 0.4)
        alike.append(torch.equal(found.local, expected))
        alike.append(torch.equal(torch.get_rng_state(), after))
    return alike


def test_dropout_draws_what_the_whole_model_draws(pool: Pool) -> None:
    for alike in pool.run(masks, 2):
        assert alike == [True] * 10


def recompute(mesh: Mesh) -> list[float]:
    subject = Subject(mesh, "gpt")
    for block in subject.cut.blocks:  # type: ignore[union-attr]
        inner = block.forward

        def again(x: Tensor, inner: Callable[..., Tensor] = inner) -> Any:
            contexts = lambda: (nullcontext(), subject.mode)  # noqa: E731
            return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)

        block.forward = again
    for loss in subject.losses(0):
        loss.backward()
    return [subject.worst(lambda t: t.grad)]


def test_recomputed_blocks_enter_the_mode_again(pool: Pool) -> None:
    assert max(pool.run(recompute, 2)[0]) < 1e-5


def narrow(mesh: Mesh) -> tuple[float, float, list[str]]:
    subject = Subject(mesh, "gpt")
    with torch.autocast("cpu", torch.bfloat16):
        cut, whole = subject.losses(0)
    cut.backward()
    whole.backward()
    kinds = {str(p.grad.dtype) for p in subject.cut.parameters() if p.grad is not None}
    return abs(cut.item() - whole.item()), subject.worst(lambda t: t.grad), sorted(kinds)


def test_autocast_computes_in_bf16_and_keeps_fp32_gradients(pool: Pool) -> None:
    for loss, gradient, kinds in pool.run(narrow, 2):
        assert loss < 1e-2
        assert gradient < 2e-2
        assert kinds == ["torch.float32"]


def strange(mesh: Mesh) -> list[float]:
    subject = Subject(mesh, "packed")
    for model in (subject.cut, subject.whole):
        model.strange = True  # type: ignore[assignment]
    cut, whole = subject.losses(0)
    cut.backward()
    whole.backward()
    return [abs(cut.item() - whole.item()), subject.worst(lambda t: t.grad)]


def test_functions_without_a_rule_are_given_whole_values(pool: Pool) -> None:
    for differences in pool.run(strange, 2):
        assert max(differences) < 1e-5


def evaluated(mesh: Mesh) -> float:
    """torch's encoder takes another way when it evaluates."""
    subject = Subject(mesh, "encoder")
    inputs, _ = subject.batch(1)
    with torch.no_grad():
        expected = subject.call(subject.whole.eval(), inputs)
        with subject.mode:
            found = subject.mode.whole(subject.call(subject.cut.eval(), inputs))
    return float((found - expected).abs().max())


def test_evaluation_needs_no_plan_of_its_own(pool: Pool) -> None:
    assert max(pool.run(evaluated, 2)) < 1e-5


def with_fsdp(mesh: Mesh) -> float:
    """Two ranks along each axis; both replicas see the same data, so their mean is the gradient."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    subject = Subject.__new__(Subject)
    subject.run, subject.name, subject.dtype = zoo.gpt(), "gpt", torch.float32
    subject.rank, subject.num_ranks = both["tensor"].get_local_rank(), 2
    subject.whole, subject.cut = subject.make(), subject.make()
    example = subject.batch(0)[0]
    subject.plan = find_cuts(subject.cut, [lambda: subject.call(subject.cut, example)], 2)
    cut_tensors(subject.cut, subject.plan, subject.rank, 2)
    subject.mode = TensorForward(both["tensor"])
    for block in subject.cut.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=both["data"])
    fully_shard(subject.cut, mesh=both["data"])
    for module in subject.cut.modules():  # after FSDP's own hook, which puts parameters in place
        module.register_forward_pre_hook(lambda module, _: mark_cut_parameters(module))
    for loss in subject.losses(0):
        loss.backward()
    return subject.worst(lambda t: None if t.grad is None else _full(t.grad))


def _full(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full


def test_parameters_that_fsdp_puts_in_place_are_tagged_again(pool: Pool) -> None:
    assert max(pool.run(with_fsdp, 4)) < 1e-5


def leak(mesh: Mesh) -> str:
    subject = Subject(mesh, "mlp")
    kept: list[Tensor] = []
    subject.cut[0].register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[index]
    subject.losses(0)
    assert kept[0].shape == (4, 64)
    try:
        kept[0] + 1
    except RecipeError as error:
        return str(error)
    return ""


def test_a_part_that_leaks_out_of_forward_says_so(pool: Pool) -> None:
    assert "Return the value from forward" in pool.run(leak, 2)[0]
