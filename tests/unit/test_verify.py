"""The comparison of `shoal verify` on records made by hand: what is told, judged and left out."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.cli.verify import in_words
from shoal.errors import RecipeError
from shoal.training.run import Run, resolve
from shoal.verify import reference
from shoal.verify.compare import Divergence, VerifyResult, compare, finished, step_path

NUM_STEPS = 3
Content = dict[str, Tensor]
Change = Callable[[Content], object]


class Faint(nn.Module):
    """Something with hardly any gradient, as a bias before BatchNorm has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1e-12 * self.weight.sum()


def small_run() -> Run:
    def model() -> nn.Module:
        frozen = nn.Linear(1, 1).requires_grad_(False)
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), frozen, Faint())

    inputs = torch.linspace(-1, 1, 32).view(16, 2)
    return Run(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(inputs, inputs.prod(1, keepdim=True)),
        batch_size=4,
        steps=NUM_STEPS,
    )


def placed(content: Content) -> Content:
    """The content with the place of each tensor in its name: all of them are whole."""
    written = {}
    for key, tensor in content.items():
        kind, _, name = key.partition("/")
        if name:
            kind = "gradient" if kind == "gradient" else "held"
            key = f"{kind}/{name}/{','.join('0' * tensor.dim())}"
        written[key] = tensor
    return written


def judge(
    directory: Path,
    change: Change = lambda content: None,
    *,
    step: int = 2,
    rank: int = 1,
    plan: str = "data=2",
) -> VerifyResult:
    """Write down what right ranks would, change one rank's step, and compare."""
    run = small_run()
    resolved = resolve(run, plan, None)
    for at, snapshots in enumerate(reference.train(run, resolved), start=1):
        for who in range(resolved.num_ranks):
            own = snapshots[who % len(snapshots)]
            speaks = at % resolved.local_steps == 0 or at == NUM_STEPS
            content = {"loss": torch.tensor([own.loss], dtype=torch.float64)}
            content["bytes_sent"] = torch.tensor([100 if speaks else 0])
            content["stepped"] = torch.tensor([31])
            content |= {f"weight/{name}": t.detach().clone() for name, t in own.weights.items()}
            content |= {f"gradient/{name}": t.clone() for name, t in own.gradients.items()}
            content |= {f"buffer/{name}": t.clone() for name, t in own.buffers.items()}
            if (at, who) == (step, rank):
                change(content)
            save_file(placed(content), step_path(directory, at, who))
    return compare(run, resolved, directory)


def test_equal_records_are_identical_and_deleted(tmp_path: Path) -> None:
    verdict = judge(tmp_path)
    assert verdict.passed and verdict.identical and verdict.num_steps == NUM_STEPS
    assert verdict.worst == {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "buffer": 0.0}
    assert verdict.verdict == "SAME" and verdict.times == 0.0 and verdict.rounding == {}
    assert [path.name for path in tmp_path.iterdir()] == ["finished"]
    assert "identical, bit for bit" in in_words(verdict, "recipe")


def scaled(name: str, factor: float) -> Change:
    return lambda content: content[name].mul_(factor)


@pytest.mark.parametrize(
    ("name", "what", "of"),
    [
        ("loss", "loss", ""),
        ("gradient/2.weight", "gradient", "2.weight"),
        ("weight/0.bias", "weight", "0.bias"),
        ("weight/3.weight", "weight", "3.weight"),
        ("buffer/1.running_var", "buffer", "1.running_var"),
    ],
)
def test_a_difference_is_named_and_measured(tmp_path: Path, name: str, what: str, of: str) -> None:
    verdict = judge(tmp_path, scaled(name, 1.01))
    assert verdict.first is not None and not verdict.passed
    found = verdict.first
    assert (found.step, found.rank, found.what, found.name) == (2, 1, what, of)
    assert 1e-4 < found.relative <= 0.0101
    assert verdict.num_steps == 2, "nothing is compared after the first difference"


def test_last_bits_are_rounding(tmp_path: Path) -> None:
    verdict = judge(tmp_path, scaled("weight/0.weight", 1 + 3e-7))
    assert verdict.passed and not verdict.identical and verdict.verdict == "WITHIN ROUNDING"
    assert 0 < verdict.worst["weight"] < 1e-6
    assert 0 < verdict.times < verdict.allowed and verdict.rounding["weight"] > 0
    words = in_words(verdict, "recipe")
    assert "WITHIN ROUNDING: no step, done from where the plan stood, differs by more" in words
    assert "an ulp in the weights makes" in words


def test_a_weight_that_is_not_trained_keeps_every_bit(tmp_path: Path) -> None:
    verdict = judge(tmp_path, scaled("weight/3.weight", 1 + 1e-7))
    assert verdict.first is not None and verdict.first.name == "3.weight"
    assert verdict.verdict == "DIFFERENT"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["weight/0.weight", "gradient/0.weight", "weight/3.weight"])
def test_what_is_not_finite_always_counts(tmp_path: Path, name: str, value: float) -> None:
    def poison(content: Content) -> None:
        content[name].view(-1)[-1] = value

    verdict = judge(tmp_path, poison)
    assert verdict.first is not None
    assert f"{verdict.first.what}/{verdict.first.name}" == name
    assert not math.isfinite(verdict.first.relative)


def test_a_gradient_that_only_one_side_has_counts(tmp_path: Path) -> None:
    """Where each rank has all of it; ranks that share state have a part each."""
    plan = "data=2 memory=apart"
    missing = judge(tmp_path, lambda content: content.pop("gradient/2.bias"), plan=plan)
    assert missing.first is not None and missing.first.relative == math.inf
    assert (missing.first.what, missing.first.name) == ("gradient", "2.bias")


def test_a_gradient_for_what_is_frozen_counts(tmp_path: Path) -> None:
    extra = judge(tmp_path, lambda content: content.update({"gradient/3.bias": torch.ones(1)}))
    assert extra.first is not None and extra.first.name == "3.bias"


def test_a_faint_gradient_is_judged_by_itself(tmp_path: Path) -> None:
    """It is 1e-12 of the others, and off by a hundredth."""
    verdict = judge(tmp_path, scaled("gradient/4.weight", 1.01))
    assert verdict.first is not None
    assert (verdict.first.what, verdict.first.name) == ("gradient", "4.weight")
    assert verdict.first.relative == pytest.approx(0.01, rel=1e-3) and verdict.first.times > 32


def test_a_weight_that_moved_without_a_gradient_is_found(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda content: content["weight/4.weight"].add_(0.5), rank=0)
    assert verdict.first is not None
    assert (verdict.first.what, verdict.first.name) == ("weight", "4.weight")


@pytest.mark.parametrize(
    ("plan", "step", "num_bytes", "words"),
    [
        ("data=2", 2, 0, "at step 2 rank 1 sent 0 bytes in a step in which replicas agree"),
        ("data=2 local_steps=2", 1, 50, "at step 1 rank 1 sent 50 bytes"),
        ("data=2 local_steps=2", 3, 0, "at step 3 rank 1 sent 0 bytes"),
    ],
)
def test_bytes_must_move_as_the_plan_says(
    tmp_path: Path, plan: str, step: int, num_bytes: int, words: str
) -> None:
    verdict = judge(
        tmp_path, lambda content: content["bytes_sent"].fill_(num_bytes), step=step, plan=plan
    )
    assert not verdict.passed and verdict.first is None
    assert verdict.complaint.startswith(words)
    assert "NOT AS PLANNED: at step" in in_words(verdict, "recipe")


def test_a_run_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    finished(tmp_path).touch()
    run = small_run()
    with pytest.raises(RecipeError, match="step-00000001-rank-000"):
        compare(run, resolve(run, "data=2", None), tmp_path)


def test_a_divergence_in_words() -> None:
    found = Divergence(3, 1, "gradient", "blocks.0.project.weight", 0.25, 4000.0, 32)
    assert str(found) == (
        "step 3, rank 1: the gradient of blocks.0.project.weight, in module blocks.0.project, "
        "differs by 2.50e-01, 4,000 times the model's own rounding (allowed: 32)"
    )
    assert str(Divergence(1, 0, "loss", "", 1.0)) == "step 1, rank 0: the loss differs by 1.00e+00"


def test_the_words_of_a_verdict_name_plan_and_place() -> None:
    first = Divergence(1, 0, "loss", "", 1.0)
    verdict = VerifyResult(1, False, {"loss": 1.0}, first=first, plan="data=2 pieces=2")
    words: Any = in_words(verdict, "a.py:b")
    assert "a.py:b under 'data=2 pieces=2' against one process, 1 steps" in words
    assert "DIFFERENT: first at step 1, rank 0: the loss differs by 1.00e+00." in words


@pytest.mark.parametrize(
    ("verdict", "word"),
    [
        (VerifyResult(), "SAME"),
        (VerifyResult(identical=False), "WITHIN ROUNDING"),
        (VerifyResult(complaint="it did nothing"), "NOT AS PLANNED"),
        (VerifyResult(first=Divergence(1, 0, "loss", "", 1.0)), "DIFFERENT"),
        (VerifyResult(first=Divergence(1, 0, "loss", "", 1.0), complaint="it failed"), "DIFFERENT"),
    ],
)
def test_the_verdict_is_one_of_four(verdict: VerifyResult, word: str) -> None:
    assert verdict.verdict == word
    assert verdict.passed == (word in ("SAME", "WITHIN ROUNDING"))
    assert word in in_words(verdict, "recipe")
