"""A pipeline trains what one process would have trained: every schedule, unlike models."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.numerics.randomness import PieceSeeds
from shoal.parallel.pipeline.pipeline import Pipeline, PipelineOptions
from shoal.parallel.pipeline.placeholders import drop_unowned
from shoal.parallel.pipeline.stages import record, split_stages
from shoal.testing.ranks import Pool
from shoal.training.run import call_model
from tests import zoo

PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2}
Batch = tuple[list[Any], list[Any]]  # inputs and targets by microbatch


class Taking:
    """Takes each microbatch's gradients away, as a trainer that sums in its own order does."""

    def __init__(self, pipeline_seeds: PieceSeeds, model: nn.Module):
        self.seeds, self.model, self.step = pipeline_seeds, model, 0
        self.taken: dict[tuple[str, int], list[Tensor]] = {}
        self.left: list[tuple[int, int]] = []

    def enter(self, microbatch: int, block: int) -> None:
        self.seeds.enter(self.step, microbatch, block)

    def back(self, microbatch: int) -> None:
        self.seeds.at(self.step, microbatch)

    def leave(self, stage: int, microbatch: int) -> None:
        self.left.append((stage, microbatch))

    def computed(self, stage: int, microbatch: int) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.taken.setdefault((name, microbatch), []).append(parameter.grad)
                parameter.grad = None


class Reference:
    """The undivided model, microbatch by microbatch."""

    def __init__(self, run: Any):
        self.run, self.model = run, run.make_model().train()
        self.seeds = PieceSeeds(self.model, run.seed)
        self.optimizer = run.make_optimizer(self.model)

    def step(self, step: int, batch: Batch) -> list[float]:
        losses, sums = [], {}
        for microbatch, (inputs, target) in enumerate(zip(*batch)):
            self.seeds.enter(step, microbatch)
            loss = scalar(self.run.loss(call_model(self.model, inputs), target))
            loss.backward()
            losses.append(loss.item())
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    add(sums, name, parameter.grad)
                    parameter.grad = None
        apply(self.model, self.optimizer, sums, len(losses))
        return losses


class Piped:
    """This rank's part of the same model."""

    def __init__(self, run: Any, schedule: str, group: Group, batch: Batch):
        self.run, self.group = run, group
        self.model: nn.Module = run.make_model().train()
        self.seeds = PieceSeeds(self.model, run.seed)
        num_stages = PER_RANK[schedule] * group.num_ranks
        forwards = [partial(call_model, self.model, inputs) for inputs in batch[0][:2]]
        tape = record(self.model, forwards, num_stages, self.seeds)
        self.plan = split_stages(tape, num_stages)
        self.hooks = Taking(self.seeds, self.model)
        options = PipelineOptions(schedule, "cpu", call_model, self.hooks)
        self.pipeline = Pipeline(self.model, self.plan, group, options)
        self.names = self.plan.held_by(self.pipeline.own_stages)
        # While all are there: a rank may hold none of what a group of the optimizer is made for.
        self.optimizer = run.make_optimizer(self.model)
        drop_unowned(self.model, self.names)

    def step(self, step: int, batch: Batch) -> list[float]:
        self.hooks.step, self.count, losses = step, len(batch[0]), {}

        def loss(output: Any, microbatch: int) -> Tensor:
            told = scalar(self.run.loss(output, batch[1][microbatch]))
            losses[microbatch] = told.item()
            return told

        self.hooks.left.clear()
        self.pipeline.run(batch[0], loss)
        expected = {(s, m) for s in self.pipeline.own_stages for m in range(len(batch[0]))}
        assert set(self.hooks.left) == expected and len(self.hooks.left) == len(expected)
        apply(self.model, self.optimizer, self._sums(), self.count)
        return [losses[i] for i in sorted(losses)]

    def _sums(self) -> dict[str, Tensor]:
        """Over microbatches in order; first over holders, as the undivided backward does."""
        sums: dict[str, Tensor] = {}
        named, shared = dict(self.model.named_parameters()), self.shared()
        for microbatch in range(self.count):
            for name in sorted({n for n, m in self.hooks.taken if m == microbatch} | set(shared)):
                grads = self.hooks.taken.pop((name, microbatch), [])
                total = sum(grads[1:], grads[0]) if grads else torch.zeros(named[name].shape)
                if name in shared:
                    dist.all_reduce(total, group=self.group.handle)
                if name in self.names:
                    add(sums, name, total)
        assert not self.hooks.taken
        return sums

    def shared(self) -> list[str]:
        """Parameters that several ranks hold, in one order everywhere."""
        ranks = {
            name: {self.pipeline.rank_of(s) for s in stages}
            for name, stages in self.plan.holders.items()
        }
        trained = self.plan.tape.parameters
        return sorted(name for name, r in ranks.items() if len(r) > 1 and trained[name])


def scalar(loss: Any) -> Tensor:
    """A mean, or the sum of a pair (sum, weight)."""
    found: Tensor = loss[0] if isinstance(loss, tuple) else loss
    return found


def add(sums: dict[str, Tensor], name: str, grad: Tensor) -> None:
    sums[name] = sums[name] + grad if name in sums else grad.clone()


def apply(
    model: nn.Module, optimizer: torch.optim.Optimizer, sums: dict[str, Tensor], count: int
) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = sums[name] / (4 * count) if name in sums else None
    optimizer.step()
    optimizer.zero_grad()


def batches(run: Any, step: int, num_microbatches: int, size: int = 2) -> Batch:
    samples = [run.data[(step * 7 + i) % len(run.data)] for i in range(num_microbatches * size)]
    collate = run.collate or torch.utils.data.default_collate
    parts = [collate(samples[i : i + size]) for i in range(0, len(samples), size)]
    return [part[0] for part in parts], [part[1] for part in parts]


def train(
    mesh: Mesh, name: str, schedule: str, num_steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Train both ways; the largest differences on this rank."""
    group = Group(dist.group.WORLD)
    run = checkpointed() if name == "checkpointed" else getattr(zoo, name)(**settings)
    count = 2 * group.num_ranks * PER_RANK[schedule]
    reference = Reference(run)
    piped = Piped(run, schedule, group, batches(run, 0, count))
    loss_apart = 0.0
    for step in range(num_steps):
        batch = batches(run, step, count)
        expected, told = reference.step(step, batch), piped.step(step, batch)
        for a, b in zip(expected, told):
            loss_apart = max(loss_apart, abs(a - b) if a == a and b == b else float("inf"))
    ref, own = dict(reference.model.named_parameters()), dict(piped.model.named_parameters())
    weights = [apart(own[n], ref[n]) for n in piped.names]
    ref_buffers, own_buffers = (dict(m.named_buffers()) for m in (reference.model, piped.model))
    used = [b for s in piped.pipeline.own_stages for b in piped.plan.stages[s].buffers]
    evaluated = evaluate(piped, reference, run)
    piped.pipeline.close()
    return {
        "loss": loss_apart,
        "weights": max(weights),
        "buffers": max((apart(own_buffers[n], ref_buffers[n]) for n in used), default=0.0),
        "held": sorted(piped.names),
        "all": sorted(ref),
        "is_tied": bool(piped.shared()),
        "evaluated": evaluated,
        "told": len(told),
    }


def evaluate(piped: Piped, reference: Reference, run: Any) -> float:
    """In evaluation, with batches of other sizes, outputs are the same."""
    piped.model.eval(), reference.model.eval()
    different = 0.0
    for size in (1, 3, 2):
        inputs, targets = batches(run, size, 1, size)
        output = piped.pipeline.forward(inputs[0])
        with torch.no_grad():
            expected = scalar(run.loss(call_model(reference.model, inputs[0]), targets[0]))
            if piped.pipeline.holds_last:
                told = scalar(run.loss(output, targets[0]))
                different = max(different, apart(told, expected))
            else:
                assert output is None
    piped.model.train(), reference.model.train()
    return different


def apart(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    found = float((a - b).abs().max())
    return found if found == found else float("inf")


class Recomputed(nn.Module):
    """A block that keeps no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + y

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(F.dropout(F.relu(self.widen(self.norm(x))), 0.2, self.training))
        return y


def checkpointed() -> Any:
    def model() -> nn.Module:
        return nn.Sequential(*(Recomputed() for _ in range(5)), nn.Linear(12, 1))

    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    return zoo.run_of(model, (x, x[:, :1].cos()), F.mse_loss, zoo.adam)


def wrong_with(ranks: list[dict[str, Any]]) -> list[str]:
    """Where ranks differ from one process, and what nobody holds or tells."""
    held = sorted({name for rank in ranks for name in rank["held"]})
    compared = ("loss", "weights", "buffers", "evaluated")
    return [
        *(key for rank in ranks for key in compared if rank[key] != 0.0),
        *("a rank holds nothing" for rank in ranks if not rank["held"]),
        *(["not all is held"] if held != ranks[0]["all"] else []),
        *([] if any(rank["told"] for rank in ranks) else ["nobody tells the loss"]),
    ]


# Each schedule meets several models, each model at least one schedule with two stages a rank.
PAIRS = [
    ("mlp", "gpipe"), ("mlp", "zbv"), ("cnn", "1f1b"), ("cnn", "zero-bubble"),
    ("unet", "interleaved"), ("unet", "zbv"), ("lstm", "zero-bubble"), ("gpt", "1f1b"),
    ("gpt", "zbv"), ("moe", "interleaved"), ("towers", "zero-bubble"), ("towers", "gpipe"),
    ("encoder", "1f1b"), ("frozen", "zero-bubble"), ("frozen", "gpipe"), ("several", "interleaved"),
    ("checkpointed", "1f1b"), ("checkpointed", "zero-bubble"), ("checkpointed", "zbv"),
]  # fmt: skip


@pytest.mark.quick(
    "mlp-gpipe",
    "cnn-1f1b",
    "unet-zbv",
    "lstm-zero-bubble",
    "moe-interleaved",
    "encoder-1f1b",
    "several-interleaved",
    "frozen-gpipe",
    "checkpointed-zbv",
)
@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_two_ranks_have_the_bits_of_one_process(pool: Pool, name: str, schedule: str) -> None:
    assert not wrong_with(pool.run(train, 2, name, schedule, 4, {}))


@pytest.mark.parametrize(("name", "schedule"), [("mlp", "1f1b"), ("gpt", "1f1b")])
def test_twenty_steps_have_the_bits_of_one_process(pool: Pool, name: str, schedule: str) -> None:
    assert not wrong_with(pool.run(train, 2, name, schedule, 20, {}))


@pytest.mark.parametrize(("name", "schedule"), [("gpt", "1f1b"), ("unet", "interleaved")])
def test_four_ranks_have_the_bits_of_one_process(pool: Pool, name: str, schedule: str) -> None:
    assert not wrong_with(
        pool.run(train, 4, name, schedule, 3, {"layers": 8} if name == "gpt" else {})
    )


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.full) for n in ("gpt2", "llama")), "bert"]
)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.full)])
def test_models_of_transformers_are_cut_too(pool: Pool, name: str, schedule: str) -> None:
    pytest.importorskip("transformers")
    assert not wrong_with(pool.run(train, 2, name, schedule, 3, {}))


def uneven(mesh: Mesh, schedule: str) -> dict[str, Any]:
    """Microbatches of different lengths in one round, and rounds that are too short."""
    run, group = zoo.gpt(), Group(dist.group.WORLD)
    full = batches(run, 0, 4)
    reference, piped = Reference(run), Piped(run, schedule, group, full)
    lengths = [[8, 5, 8, 3], [6, 6, 6, 6], [8], [8, 8, 8]]
    apart_by = 0.0
    for step, row in enumerate(lengths):
        inputs, targets = batches(run, step, len(row))
        batch = (
            [x[:, :n] for x, n in zip(inputs, row)],
            [t[:, :n].contiguous() for t, n in zip(targets, row)],
        )
        expected, told = reference.step(step, batch), piped.step(step, batch)
        apart_by = max([apart_by, *(abs(a - b) for a, b in zip(expected, told))])
    ref, own = dict(reference.model.named_parameters()), dict(piped.model.named_parameters())
    piped.pipeline.close()
    return {"loss": apart_by, "weights": max(apart(own[n], ref[n]) for n in piped.names)}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zbv"])
def test_microbatches_may_differ_in_shape_and_number(pool: Pool, schedule: str) -> None:
    assert pool.run(uneven, 2, schedule) == [{"loss": 0.0, "weights": 0.0}] * 2


class Fussy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1e6).any()):
            raise ValueError("too large for me")
        return x


def fail(mesh: Mesh, who: str) -> str:
    """What a rank sees when the model fails, or when its peer leaves."""
    group = Group(dist.group.WORLD)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers[:2], nn.Sequential(Fussy(), layers[2]), layers[3])
    inputs = [torch.randn(2, 4) for _ in range(4)]
    plan = split_stages(record(model, [partial(model, x) for x in inputs[:2]], 2), 2)
    pipeline = Pipeline(model, plan, group, PipelineOptions("1f1b", "cpu", call_model))
    try:
        if who == "model" and group.rank == 1:
            nn.init.constant_(layers[1].bias, 1e7), nn.init.constant_(layers[2].bias, 1e7)
        if who == "model" and group.rank == 0:
            nn.init.constant_(layers[1].bias, 1e7)
        if who == "peer" and group.rank == 1:
            return "left"
        pipeline.run(inputs, lambda output, _: output.sum())
    except Exception as error:  # noqa: BLE001 (its kind is what is asked)
        return f"{type(error).__name__}: {error}"
    finally:
        pipeline.close()
    return "nothing"


def test_an_error_of_the_model_stays_what_it_is(pool: Pool) -> None:
    first, second = pool.run(fail, 2, "model")
    assert second == "ValueError: too large for me"
    assert first.startswith("GroupLost")


def test_a_peer_that_left_is_a_lost_group(pool: Pool) -> None:
    first, second = pool.run(fail, 2, "peer")
    assert second == "left"
    assert first.startswith("GroupLost: the group broke while ") and "of the pipeline" in first


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("no way back") from KeyError("a reason")


class OneWay(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = NoWayBack.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return found


def made_of(layers: list[nn.Module], schedule: str, inputs: list[Tensor]) -> Pipeline:
    model, group = nn.Sequential(*layers), Group(dist.group.WORLD)
    num_stages = PER_RANK[schedule] * group.num_ranks
    plan = split_stages(
        record(model, [partial(model, x) for x in inputs[:2]], num_stages), num_stages
    )
    return Pipeline(model, plan, group, PipelineOptions(schedule, "cpu", call_model))


def fail_in_backward(mesh: Mesh, schedule: str) -> list[str]:
    inputs = [torch.randn(2, 4) for _ in range(4)]
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), OneWay(4, 4), nn.Linear(4, 4)]
    pipeline = made_of(layers, schedule, inputs)
    try:
        pipeline.run(inputs, lambda output, _: output.sum())
    except Exception as error:  # noqa: BLE001 (its kind is what is asked)
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    finally:
        pipeline.close()
    return []


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("zero-bubble", marks=pytest.mark.full)])
def test_an_error_in_backward_stays_what_it_is(pool: Pool, schedule: str) -> None:
    first, second = pool.run(fail_in_backward, 2, schedule)
    assert ["ValueError", "no way back", "KeyError"] in (first, second)
    assert "GroupLost" in (first[0], second[0])


class Counted(nn.Linear):
    """Counts the results that are still there."""

    def __init__(self, alive: dict[str, int]):
        super().__init__(4, 4)
        self.alive, self.results = alive, weakref.WeakSet[Any]()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).relu()
        self.results.add(y.untyped_storage())
        self.alive["most"] = max(self.alive["most"], len(self.results))
        return y


def count_alive(mesh: Mesh, schedule: str) -> int:
    inputs, alive = [torch.randn(2, 4) for _ in range(16)], {"most": 0}
    layers = [m for _ in range(4) for m in (Counted(alive), nn.Linear(4, 4))]
    pipeline = made_of(layers, schedule, inputs)
    alive["most"] = 0
    pipeline.run(inputs, lambda output, _: output.sum())
    pipeline.close()
    return alive["most"]


def test_a_backward_lets_go_of_what_the_forward_kept(pool: Pool) -> None:
    """A rank holds as many microbatches as stages follow, and gpipe all of them."""
    assert pool.run(count_alive, 2, "1f1b") == [2, 1]
    assert pool.run(count_alive, 2, "gpipe") == [16, 16]
    for schedule in ("interleaved", "zero-bubble", "zbv"):
        assert max(pool.run(count_alive, 2, schedule)) <= 4


class Offset(nn.Module):
    """The gradients of its parameters may be the very tensors that stages send each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.first, self.last = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x + self.first, self.weight).tanh() + self.last


def two_rounds(mesh: Mesh, schedule: str) -> tuple[float, float]:
    """How far gradients over two rounds are from those of one process, and what was sent from what
    it was then."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4) for _ in range(8)]
    pipeline = made_of([Offset() for _ in range(4)], schedule, inputs[:4])
    send, sent = pipeline.messages.send, []

    def noted(tensors: list[Tensor], rank: int) -> None:
        sent.extend((tensor, tensor.clone()) for tensor in tensors)
        send(tensors, rank)

    pipeline.messages.send = noted  # type: ignore[method-assign,assignment]
    for part in (inputs[:4], inputs[4:]):
        pipeline.run(part, lambda output, _: output.square().sum())
    own = [n for s in pipeline.own_stages for n in pipeline.plan.stages[s].parameters]
    pipeline.close()
    named = dict(pipeline.model.named_parameters())
    found = {name: named[name].grad for name in own}
    pipeline.model.zero_grad()
    for x in inputs:
        pipeline.model(x).square().sum().backward()
    gradients = [(found[name], named[name].grad) for name in own]
    wrong = max(apart(a, b) for a, b in gradients if a is not None and b is not None)
    return wrong, max(apart(now, then) for now, then in sent)


@pytest.mark.parametrize("schedule", sorted(PER_RANK))
def test_gradients_and_messages_are_apart(pool: Pool, schedule: str) -> None:
    for wrong, written_into in pool.run(two_rounds, 2, schedule):
        assert wrong < 1e-5
        assert written_into == 0.0
