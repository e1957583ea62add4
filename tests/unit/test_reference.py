"""The reference against the plainest loop there is, and against sums written out by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal import reference
from shoal.data.loader import Batches
from shoal.errors import NotFinite, RecipeError
from shoal.mesh import LauncherSeat
from shoal.plan import Plan
from shoal.run import Run, resolve
from shoal.training import Trainer
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

    total = reference.tree_sum(leaf, range(num_pieces))
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


def test_a_batch_without_weight_is_refused() -> None:
    run = run_of(loss=lambda output, target: (F.mse_loss(output, target, reduction="sum"), 0.0))
    with (
        pytest.raises(RecipeError, match="add up to 0"),
        Trainer(run, plan_of(run, "data=1"), LauncherSeat(World())) as trainer,
    ):
        next(iter(trainer))
