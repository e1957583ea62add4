"""Rounding and errors told apart: runs of one process, with their last bits moved or broken, are
judged as a plan would be."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.numerics.precision import environment_for
from shoal.training.run import Run, resolve
from shoal.verify import reference
from shoal.verify.compare import VerifyResult, compare, step_path
from shoal.verify.rounding import perturb

Change = Callable[[dict[str, Tensor]], object]
NUM_STEPS = 3


def run_of(model: Callable[[], nn.Module], adam: bool = False, **changes: Any) -> Run:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        if adam:
            return torch.optim.Adam(named, lr=1e-2)
        return torch.optim.SGD(named, lr=1e-2, momentum=0.9)

    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(3))
    given: dict[str, Any] = {
        "loss": F.mse_loss,
        "data": shoal.data.tensors(inputs, inputs.sin().sum(1, keepdim=True)),
        "batch_size": 16,
        "steps": NUM_STEPS,
    }
    return Run(model=model, optimizer=optimizer, **(given | changes))


class Moved(reference.Replica):
    """One process as a right plan might be: its first weights are moved by some ulps."""

    num_ulps, seed = 1, 5

    def __init__(self, *given: Any):
        super().__init__(*given)
        perturb(self.model, self.precision, self.num_ulps, self.seed)


def broken(change: Change) -> type[Moved]:
    """One whose gradients are changed before the optimizer sees them."""

    class Broken(Moved):
        def __init__(self, *given: Any):
            super().__init__(*given)
            step = self.optimizer.step

            def changed() -> None:
                named = self.model.named_parameters()
                change({name: p.grad for name, p in named if p.grad is not None})
                step()

            self.optimizer.step = changed  # type: ignore[method-assign, assignment]

    return Broken


def judge(
    directory: Path, run: Run, kind: type[reference.Replica] = Moved, plan: str = "data=1"
) -> VerifyResult:
    """Write down what such a process makes, as a rank would, and compare."""
    resolved = resolve(run, plan, None)
    for step, (own,) in enumerate(reference.train(run, resolved, kind), start=1):
        content = {"loss": torch.tensor([own.loss], dtype=torch.float64)}
        content |= {"bytes_sent": torch.tensor([0]), "stepped": torch.tensor([1])}
        content |= dict(_parts("gradient", own.gradients))
        content |= dict(_parts("held", {**own.weights, **own.buffers}))
        save_file(content, step_path(directory, step, 0))
    return compare(run, resolved, directory)


def _parts(kind: str, tensors: Any) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield f"{kind}/{name}/{','.join('0' * tensor.dim())}", tensor.detach().clone()


def place(verdict: VerifyResult) -> tuple[int, str, str] | None:
    first = verdict.first
    return None if first is None else (first.step, first.what, first.name)


class Chaos(nn.Module):
    """A logistic map after a layer: it doubles a difference again and again."""

    def __init__(self, times: int = 18):
        super().__init__()
        self.read, self.write, self.times = nn.Linear(6, 8), nn.Linear(8, 1), times

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.read(inputs).sigmoid()
        for _ in range(self.times):
            state = 3.99 * state * (1 - state)
        written: Tensor = self.write(state)
        return written


def test_chaos_is_the_models_own(tmp_path: Path) -> None:
    verdict = judge(tmp_path, run_of(Chaos))
    assert verdict.verdict == "WITHIN ROUNDING", verdict.first
    assert verdict.worst["gradient"] > 1e-2, "an ulp grew"
    assert verdict.rounding["gradient"] > 1e-4, "and is told as the model's own"
    assert 0 < verdict.times <= verdict.allowed == 32


def test_an_error_is_found_beside_chaos(tmp_path: Path) -> None:
    """The last layer's bias is not part of it."""
    verdict = judge(
        tmp_path, run_of(Chaos), broken(lambda gradients: gradients["write.bias"].mul_(1.5))
    )
    assert place(verdict) == (1, "gradient", "write.bias")


class Faint(nn.Module):
    """A part whose gradient is a millionth of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.faint = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.loud(inputs) + 1e-6 * self.faint(inputs).tanh()
        return mixed


@pytest.mark.parametrize("name", ["faint.weight", "faint.bias"])
@pytest.mark.parametrize("factor", [0.0, 1.01], ids=["missing", "off"])
def test_a_small_gradient_is_measured_by_itself(tmp_path: Path, name: str, factor: float) -> None:
    """Far below the last bits of the whole gradient's norm."""
    verdict = judge(tmp_path, run_of(Faint), broken(lambda gradients: gradients[name].mul_(factor)))
    assert place(verdict) == (1, "gradient", name)
    assert verdict.first is not None
    assert verdict.first.relative == pytest.approx(abs(factor - 1), rel=0.1)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def test_a_gradient_that_is_noise_may_be_any(tmp_path: Path) -> None:
    """A bias before BatchNorm: Adam makes whole steps of noise, here in the other direction."""
    run = run_of(normed, adam=True)
    verdict = judge(tmp_path, run, broken(lambda gradients: gradients["0.bias"].neg_()))
    assert verdict.verdict == "WITHIN ROUNDING", verdict.first
    assert verdict.worst["weight"] > 1e-3


def test_noise_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    run = run_of(normed, adam=True)
    verdict = judge(tmp_path, run, broken(lambda gradients: gradients["0.bias"].add_(1e-5)))
    assert place(verdict) == (1, "gradient", "0.bias")


class Unused(nn.Module):
    """An embedding of which no batch has the rows that count."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.gated = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        gate = torch.zeros_like(inputs[:, :1])
        mixed: Tensor = self.main(inputs) + gate * self.gated(inputs)
        return mixed


def test_a_gradient_of_zeros_stays_zero(tmp_path: Path) -> None:
    verdict = judge(
        tmp_path, run_of(Unused), broken(lambda gradients: gradients["gated.bias"].add_(1e-7))
    )
    assert place(verdict) == (1, "gradient", "gated.bias")


class Routed(nn.Module):
    """A gate whose two scores are the same but for a last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([1.0, 1.0 + 2.0**-23]))
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        weight, chosen = self.scores.softmax(0).max(0)
        answers = torch.stack([expert(inputs) for expert in self.experts])
        routed: Tensor = weight * answers[chosen]
        return routed


def test_a_route_that_flips_is_the_models_own(tmp_path: Path) -> None:
    flipped = 0
    for seed in range(8):
        (tmp_path / str(seed)).mkdir()
        kind = type("Seeded", (Moved,), {"seed": seed})
        verdict = judge(tmp_path / str(seed), run_of(Routed, steps=1), kind)
        assert verdict.passed, verdict.first
        flipped += verdict.worst["gradient"] > 0.1
    assert 0 < flipped < 8


def test_an_optimizer_that_forgets_is_found(tmp_path: Path) -> None:
    """Its gradients are right; its momentum is lost before the second step."""

    class Forgets(Moved):
        def update(self, *given: Any) -> bool:
            self.optimizer.state.clear()
            return super().update(*given)

    verdict = judge(tmp_path, run_of(Faint), Forgets)
    assert place(verdict) == (2, "weight", "loud.weight")


def test_a_lost_sample_is_found_in_the_middle_of_chaos(tmp_path: Path) -> None:
    class Loses(Moved):
        def piece(self, batch: Any, *more: Any) -> Any:
            def loss(output: Tensor, target: Tensor) -> Tensor:
                return F.mse_loss(output[:-1], target[:-1])

            whole, lossy = self.run, dataclasses.replace(self.run, loss=loss)
            self.run = lossy if batch.step == 1 else whole
            try:
                return super().piece(batch, *more)
            finally:
                self.run = whole

    verdict = judge(tmp_path, run_of(lambda: Chaos(10)), Loses)
    assert place(verdict) == (2, "loss", "")


def test_dropout_of_another_seed_is_found(tmp_path: Path) -> None:
    class Reseeded(Moved):
        def piece(self, batch: Any, *more: Any) -> Any:
            self.seeds._seed = 1
            return super().piece(batch, *more)

    run = run_of(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    assert place(judge(tmp_path, run, Reseeded)) == (1, "loss", "")


class Counts(nn.Module):
    """Does something else on each call, by a number that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls = nn.Linear(6, 1), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        scaled: Tensor = self.layer(inputs) * self.num_calls
        return scaled


def test_twins_do_not_disturb_a_model_that_counts(tmp_path: Path) -> None:
    verdict = judge(tmp_path, run_of(Counts))
    assert verdict.verdict == "WITHIN ROUNDING", verdict.first


class Jittered(reference.Replica):
    """Computes with weights that are moved by an ulp of its precision, and steps on its own."""

    def step(self, batch: Any) -> tuple[float, float]:
        self.kept = [p.detach().clone() for p in self.model.parameters()]
        perturb(self.model, self.precision, 1, batch.step)
        return super().step(batch)

    def update(self, *given: Any) -> bool:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self.kept, strict=True):
                p.copy_(value)
        return super().update(*given)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_ulp_is_that_of_the_precision(tmp_path: Path, precision: str) -> None:
    os.environ.update(environment_for(precision))
    plan = f"data=1 precision={precision}"
    run = run_of(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    verdict = judge(tmp_path, run, Jittered, plan)
    assert verdict.verdict == "WITHIN ROUNDING", verdict.first
    assert (verdict.worst["gradient"] > 1e-4) == (precision != "fp32")
    missing = broken(lambda gradients: gradients["2.bias"].zero_())
    missing.num_ulps = 0
    (tmp_path / "missing").mkdir()
    assert place(judge(tmp_path / "missing", run, missing, plan)) == (1, "gradient", "2.bias")


class Draws(nn.Module):
    """Draws of numpy, which no plan and no seed of torch repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        scaled: Tensor = self.layer(inputs) * (1 + 0.01 * np.random.rand())
        return scaled


def test_draws_that_are_not_torchs_excuse_no_plan(tmp_path: Path) -> None:
    verdict = judge(tmp_path, run_of(Draws))
    assert place(verdict) == (1, "loss", "")
    assert 1e-5 < verdict.unsteady < 0.1


def test_a_model_that_can_be_repeated_is_steady(tmp_path: Path) -> None:
    assert not judge(tmp_path, run_of(Chaos)).unsteady
