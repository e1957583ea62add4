"""A loop of one's own in one process: what it keeps, how it ends, what it may not change."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.checkpoint.find import list_steps
from shoal.errors import RecipeError
from shoal.numerics import schedules
from shoal.storage.object_store import open_store
from shoal.training.run import make_batches

Answer = tuple[list[float], list[Tensor], list[Tensor]]


def run_of(**changes: Any) -> shoal.Run:
    x = torch.linspace(-1, 1, 32)[:, None]
    run = shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        data=shoal.data.tensors(x, 2 * x),
        batch_size=8,
        steps=12,
    )
    return dataclasses.replace(run, **changes)


def train(kept: Path | None = None, until: int = 99, plan: str = "data=1") -> Answer:
    """With averages, a counter, a scheduler and a decay of its own, saved and gone on from."""
    run = run_of(save_every=None if kept is None else 4)
    with shoal.trainer(run, plan=plan, checkpoints=kept, resume=kept is not None) as trainer:
        state = trainer.state
        state["count"] = 0
        ema = state["ema"] = [p.detach().clone() for p in trainer.model.parameters()]
        state["steps"] = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3, gamma=0.5)
        seen = []
        for info in trainer:
            state["count"] += 1
            torch._foreach_lerp_(ema, [p.detach() for p in trainer.model.parameters()], 0.1)
            state["steps"].step()
            trainer.optimizer.param_groups[0]["weight_decay"] *= 1.5
            seen.append(info.loss)
            if info.step == until:
                break
        assert state["count"] == trainer.step
    return seen, [*trainer.model.parameters()], ema


@pytest.mark.parametrize("until", [2, 5, 8])
def test_a_loop_that_ended_early_goes_on_with_the_same_bits(tmp_path: Path, until: int) -> None:
    losses, weights, ema = train()
    first, _, _ = train(tmp_path, until)
    assert list_steps(open_store(tmp_path))[0].endswith(f"{until}"), "the end was saved"
    rest, weights_then, ema_then = train(tmp_path)
    assert first + rest == losses
    assert all(map(torch.equal, weights, weights_then)) and all(map(torch.equal, ema, ema_then))


def test_a_checkpoint_without_a_loops_state_is_gone_on_from(tmp_path: Path) -> None:
    with shoal.trainer(run_of(), checkpoints=tmp_path) as trainer:
        for info in trainer:
            if info.step == 3:
                break
    with shoal.trainer(run_of(), checkpoints=tmp_path, resume=True) as trainer:
        trainer.state["count"] = 7
        assert next(iter(trainer)).step == 4
        assert trainer.state == {"count": 7}
        trainer.stop()


def test_stop_ends_the_loop_after_the_step_it_is_at() -> None:
    steps = []
    with shoal.trainer(run_of()) as trainer:
        for info in trainer:
            steps.append(info.step)
            if info.step == 4:
                trainer.stop()
    assert steps == [1, 2, 3, 4] and not trainer.stopped


@pytest.mark.parametrize("code", [0, None, 3])
def test_leaving_by_exit_saves_if_it_is_no_failure(tmp_path: Path, code: int | None) -> None:
    with pytest.raises(SystemExit), shoal.trainer(run_of(), checkpoints=tmp_path) as trainer:
        for info in trainer:
            if info.step == 3:
                raise SystemExit(code)
    assert bool(list_steps(open_store(tmp_path))) == (not code)


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return model


def unfreeze(trainer: Any) -> None:
    trainer.model[0].requires_grad_(True)


def add(trainer: Any) -> None:
    named = [(f"0.{name}", p) for name, p in trainer.model[0].named_parameters()]
    trainer.optimizer.add_param_group({"params": named})


def replace(trainer: Any) -> None:
    trainer.model[2] = nn.Linear(4, 1)


def take_out(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unfreeze, "^0.weight was frozen when the trainer began"),
        (add, "^0.weight was added to the optimizer"),
        (replace, "^Another 2.(weight|bias) was put into the model"),
        (take_out, "^Parameters were taken out of the optimizer"),
    ],
)
def test_what_would_not_be_trained_is_named(change: Any, said: str) -> None:
    with (
        pytest.raises(RecipeError, match=said),
        shoal.trainer(run_of(model=frozen_first)) as trainer,
    ):
        for info in trainer:
            if info.step == 3:
                change(trainer)


def test_a_layer_that_is_frozen_for_a_while_is_as_in_a_plain_loop() -> None:
    with shoal.trainer(run_of(), plan="data=1") as trainer:
        for info in trainer:
            if info.step in (3, 8):
                trainer.model[0].requires_grad_(info.step == 8)
            if info.step == 3:
                held = trainer.model[0].weight.clone()
            if info.step == 8:
                assert torch.equal(held, trainer.model[0].weight)
    run = run_of()
    model = run.make_model()
    optimizer = run.make_optimizer(model)
    batches = make_batches(run, 1)
    for step in range(12):
        optimizer.zero_grad()
        piece = batches.at(step).piece(0)
        run.loss(model(piece.inputs), piece.target).backward()
        optimizer.step()
        if step in (2, 7):
            model[0].requires_grad_(step == 7)
    assert all(map(torch.equal, trainer.model.parameters(), model.parameters()))


@pytest.mark.parametrize(("steps", "jumps"), [(12, False), (24, True)])
def test_a_schedule_that_is_another_on_resume_is_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    jumps: bool,
) -> None:
    monkeypatch.setattr(logging.getLogger("shoal"), "propagate", True)
    changes: dict[str, Any] = {"schedule": schedules.cosine(warmup=2)}
    with shoal.trainer(run_of(**changes), checkpoints=tmp_path) as trainer:
        for info in trainer:
            if info.step == (12 if jumps else 6):
                break
    with shoal.trainer(run_of(steps=steps, **changes), checkpoints=tmp_path, resume=True) as again:
        for _ in again:
            break
    said = [r.getMessage() for r in caplog.records if "The learning rate was" in r.getMessage()]
    assert len(said) == jumps
    if jumps:
        assert "at step 12 and is" in said[0] and "over 24 steps now" in said[0]
        assert "the run had steps=12" in said[0]
