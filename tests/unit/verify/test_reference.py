"""The reference against the plainest loop there is, and against sums written out by hand."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.mesh import LauncherSeat
from shoal.data.batches import Batches
from shoal.errors import NotFinite, RecipeError
from shoal.plans.plan import Plan
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.verify import reference, reference_outer
from shoal.world import World

INPUTS = torch.linspace(-1, 1, 24)[:, None].repeat(1, 3) * torch.tensor([1.0, -2.0, 0.5])


def run_of(**changes: Any) -> Run:
    run = Run(
        model=lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(INPUTS, INPUTS.sum(1, keepdim=True).exp()),
        batch_size=8,
        steps=4,
    )
    return dataclasses.replace(run, **changes)


def plan_of(run: Run, text: str) -> Plan:
    return resolve(run, text, None)


def weights_after(run: Run, plan: str) -> list[Tensor]:
    """Of the first replica."""
    *_, last = reference.train(run, plan_of(run, plan))
    return [weight.detach().clone() for weight in last[0].weights.values()]


def plain_loop(run: Run) -> list[Tensor]:
    model = run.make_model()
    optimizer = run.make_optimizer(model)
    batches = Batches(run.data, batch_size=run.batch_size, seed=run.seed)
    for step in range(run.num_steps()):
        piece = batches.at(step).piece(0)
        optimizer.zero_grad()
        run.loss(model(piece.inputs), piece.target).backward()
        if run.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_one_piece_is_a_plain_loop_bit_for_bit() -> None:
    run = run_of()
    assert all(map(torch.equal, weights_after(run, "data=1"), plain_loop(run)))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("plan", ["data=1", "data=2", "data=4", "data=2 accumulate=4"])
def test_pieces_are_a_plain_loop_up_to_rounding(plan: str, clip: float | None) -> None:
    run = run_of(clip=clip)
    for ours, theirs in zip(weights_after(run, plan), plain_loop(run), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_pair_of_sum_and_weight_is_divided_once() -> None:
    """With weights that differ from piece to piece, the mean over samples is the truth."""

    def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counts = (target > 1).float()
        return (counts * (output - target).square()).sum(), counts.sum()

    def mean(output: Tensor, target: Tensor) -> Tensor:
        total, weight = pair(output, target)
        return total / weight

    truth = plain_loop(run_of(loss=mean))
    for ours, theirs in zip(weights_after(run_of(loss=pair), "data=4"), truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_pieces", "text"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_pieces_are_summed_in_the_order_of_one_tree(num_pieces: int, text: str) -> None:
    class Term(str):
        def __add__(self, other: str) -> "Term":
            return Term(f"({self!s}+{other!s})")

    asked: list[int] = []

    def leaf(piece: int) -> Any:
        asked.append(piece)
        return [Term(piece), None if piece else Term("first"), None]

    total = reference_outer.tree_sum(leaf, range(num_pieces))
    assert total == [text, "first", None]
    assert asked == list(range(num_pieces)), "pieces must be asked for in order"


def test_replicas_of_local_steps_part_and_meet() -> None:
    run = run_of(steps=5)
    gaps, losses = [], []
    for replicas in reference.train(run, plan_of(run, "data=2 local_steps=2")):
        first, second = ([*replica.weights.values()] for replica in replicas)
        gaps.append(not all(map(torch.equal, first, second)))
        losses.append(replicas[0].loss == replicas[1].loss)
    assert gaps == [True, False, True, False, False], "every second step, and the last, they meet"
    assert losses == [False, True, False, True, True]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_outer_step_is_sgd_with_nesterov_momentum(num_replicas: int) -> None:
    """By torch's own optimizer, on the way that plain loops went in each window."""
    run, window = run_of(steps=6), 2
    anchor = [p.detach().clone() for p in run.make_model().parameters()]
    outer = torch.optim.SGD(anchor, lr=0.5, momentum=0.8, nesterov=True)
    models = [run.make_model() for _ in range(num_replicas)]
    inner = [run.make_optimizer(model) for model in models]
    batches = Batches(run.data, batch_size=8, num_pieces=num_replicas, seed=run.seed)
    for step in range(6):
        for number, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            piece = batches.at(step).piece(number)
            optimizer.zero_grad()
            run.loss(model(piece.inputs), piece.target).backward()
            optimizer.step()
        if (step + 1) % window == 0:
            with torch.no_grad():
                for p, *own in zip(anchor, *(m.parameters() for m in models), strict=True):
                    p.grad = p - torch.stack(own).mean(0)
                outer.step()
                for model in models:
                    for p, value in zip(model.parameters(), anchor, strict=True):
                        p.copy_(value)
    plan = f"data={num_replicas} local_steps={window} outer=nesterov:0.5:0.8"
    for ours, theirs in zip(weights_after(run, plan), anchor, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fragments_leave_in_turn_and_meet_at_the_end() -> None:
    run, gaps = run_of(steps=6), []
    plan = plan_of(run, "data=2 local_steps=4 fragments=2")
    for replicas in reference.train(run, plan):
        pairs = zip(*(replica.weights.values() for replica in replicas), strict=True)
        gaps.append([float((a - b).detach().abs().max()) for a, b in pairs])
    first, last = [row[0] for row in gaps], [row[-1] for row in gaps]
    assert first[3] < first[2], "the first half was sent after step 2 and has arrived"
    assert last[3] > last[2], "the second is sent only now"
    assert gaps[-1] == [0.0] * len(gaps[-1])


@pytest.mark.parametrize(("codec", "most"), [("bf16", 2e-3), ("int8", 2e-3), ("int4", 2e-2)])
def test_packing_moves_weights_by_little(codec: str, most: float) -> None:
    run = run_of(steps=8)
    plan = "data=4 local_steps=2 outer=nesterov:0.7:0.5"
    pairs = zip(weights_after(run, plan), weights_after(run, f"{plan} codec={codec}"), strict=True)
    apart = [float((a - b).abs().max()) for a, b in pairs]
    assert 0 < max(apart) < most


def test_buffers_are_the_mean_over_pieces() -> None:
    run = run_of(model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), steps=1)
    (after,) = next(reference.train(run, plan_of(run, "data=4")))
    batch = Batches(run.data, batch_size=8, num_pieces=4, seed=run.seed).at(0)
    means = torch.stack([0.1 * batch.piece(i).inputs.double().mean(0) for i in range(4)])
    torch.testing.assert_close(after.buffers["0.running_mean"], means.mean(0).float())
    assert after.buffers["0.num_batches_tracked"] == 1


def test_a_short_batch_counts_its_samples() -> None:
    """24 samples in batches of 10: the third has 4, of which a fourth piece may get one or none."""
    run = run_of(batch_size=10, steps=3, end="pad")
    whole = weights_after(run, "data=1")
    for ours, theirs in zip(weights_after(run, "data=5"), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_overflow_in_fp16_halves_the_scale_and_repeats_the_batch() -> None:
    def loud(output: Tensor, target: Tensor) -> Tensor:
        return 50 * F.mse_loss(output, target)

    run = run_of(loss=loud, steps=2)
    replica = reference.Replica(run, plan_of(run, "precision=fp16 data=1"), range(1))
    before = replica.loss_scale.value
    loss, weight = replica.step(Batches(run.data, batch_size=8, seed=run.seed).at(0))
    assert replica.loss_scale.value < before
    assert weight == 8 and loss > 0
    assert all(torch.isfinite(p).all() for p in replica.model.parameters())


def test_what_is_not_finite_at_scale_1_ends_it() -> None:
    run = run_of(loss=lambda output, target: (output * float("inf")).mean())
    with pytest.raises(NotFinite, match="step 1"):
        next(reference.train(run, plan_of(run, "data=1")))


class Emptied:
    """Of 24 samples the second 8 cannot be loaded."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if 8 <= index < 16:
            raise ValueError("no good")
        return INPUTS[index], INPUTS[index].sum(0, keepdim=True)


def test_a_batch_that_quarantine_emptied_changes_nothing(tmp_path: Path) -> None:
    data = shoal.data.in_order(shoal.data.quarantine(Emptied(), tmp_path / "bad.jsonl"))
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    run = run_of(data=data, steps=3, model=lambda: copy.deepcopy(model))
    states = []
    for (after,) in reference.train(run, plan_of(run, "data=1 pieces=2")):
        kept = [*after.weights.values(), *after.buffers.values()]
        states.append((after.loss, [tensor.detach().clone() for tensor in kept]))
    (_, one), (loss, two), (_, three) = states
    assert math.isnan(loss) and all(map(torch.equal, one, two))
    assert not all(map(torch.equal, two, three))


def test_a_batch_without_weight_is_refused() -> None:
    run = run_of(loss=lambda output, target: (F.mse_loss(output, target, reduction="sum"), 0.0))
    with pytest.raises(RecipeError, match="add up to 0"):
        next(reference.train(run, plan_of(run, "data=1")))
    with (
        pytest.raises(RecipeError, match="add up to 0"),
        Trainer(run, plan_of(run, "data=1"), LauncherSeat(World())) as trainer,
    ):
        next(iter(trainer))


def test_a_share_without_weight_is_refused_where_it_is_a_step_of_its_own() -> None:
    run = run_of(loss=lambda output, target: (F.mse_loss(output, target, reduction="sum"), 0.0))
    with pytest.raises(RecipeError, match="this replica's share of its batch counts"):
        next(reference.train(run, plan_of(run, "data=2 local_steps=2")))
