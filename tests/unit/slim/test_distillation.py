"""A teacher in a Run: what the loss is, where the answers come from, and what does not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import UsageError
from shoal.slim.distillation import StudentWithTaps, distill, divergence
from shoal.training.run import call_model, make_batches, objective
from tests import zoo


def run_of(width: int = 8, num_classes: int = 3, **given: Any) -> shoal.Run:
    torch.manual_seed(1)
    inputs, target = torch.randn(32, 6), torch.arange(32) % num_classes
    return dataclasses.replace(
        zoo.mlp(),
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, num_classes)),
        loss=F.cross_entropy,
        data=shoal.data.tensors(inputs, target),
        evaluate=shoal.data.tensors(inputs, target),
        batch_size=8,
        **given,
    )


def losses(run: shoal.Run, num_pieces: int = 2) -> list[float]:
    model = run.make_model().train()
    batches = make_batches(run, num_pieces)
    pieces = [batches.at(0).piece(index) for index in range(num_pieces)]
    return [float(objective(run, call_model(model, p.inputs), p).tensor.detach()) for p in pieces]


def test_the_loss_mixes_both_parts() -> None:
    run, teacher = run_of(), run_of(width=16).make_model()
    taught = distill(run, teacher, temperature=3.0, alpha=0.3)
    student = run.make_model()
    for index, found in enumerate(losses(taught)):
        piece = make_batches(run, 2).at(0).piece(index)
        with torch.no_grad():
            own, theirs = student(piece.inputs), teacher(piece.inputs)
            soft = 9 * F.kl_div(
                F.log_softmax(own / 3, 1), F.softmax(theirs / 3, 1), reduction="batchmean"
            )
            wanted = 0.7 * F.cross_entropy(own, piece.target) + 0.3 * soft
        assert found == pytest.approx(float(wanted), rel=1e-5)
    assert {name for name, _ in taught.make_model().named_parameters()} == {
        name for name, _ in student.named_parameters()
    }


def test_a_quantised_teacher_is_known_by_its_numbers() -> None:
    quantization = pytest.importorskip("shoal.slim.quantization")
    found = set()
    for factor in (1, 2):
        teacher = run_of(width=16).make_model()
        with torch.no_grad():
            teacher[2].weight.mul_(factor)
        quantization.quantize_model(teacher, "int8")
        found.add(distill(run_of(), teacher).loss.__qualname__)
    assert len(found) == 2


def test_a_sum_with_a_weight_stays_one_and_parts_keep_their_names() -> None:
    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output, target, reduction="sum"), len(target)

    def named(output: Tensor, target: Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(output, target), "largest": output.max()}

    teacher = run_of(width=16).make_model()
    mean, pair = run_of(), dataclasses.replace(run_of(), loss=summed)
    ones = losses(distill(mean, teacher))
    assert losses(distill(dataclasses.replace(mean, loss=named), teacher)) == ones
    others = [loss / 4 for loss in losses(distill(pair, teacher))]  # a piece has 4 samples
    assert ones == pytest.approx(others)


@pytest.mark.parametrize("dim", [1, 2])
def test_classes_may_be_in_either_dim_and_targets_left_out(dim: int) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    target = torch.randint(0, 4, (2, 5))
    target[0, :3] = -100
    if dim == 1:
        student, teacher = student.mT.contiguous(), teacher.mT.contiguous()
    found = divergence(student, teacher, target, 1.0)
    keep = target >= 0
    ones, others = (t.movedim(dim, -1)[keep] for t in (student, teacher))
    wanted = F.kl_div(ones.log_softmax(-1), others.softmax(-1), reduction="batchmean")
    assert torch.allclose(found, wanted)
    assert divergence(ones, others, torch.rand(len(ones)), 5.0).equal(F.mse_loss(ones, others))


def test_a_cache_gives_the_same_answers_and_asks_once(tmp_path: Path) -> None:
    run, teacher = run_of(), run_of(width=16).make_model()
    plain = losses(distill(run, teacher))
    assert losses(distill(run, teacher, cache=tmp_path)) == pytest.approx(plain, rel=1e-5)
    again = distill(run, teacher, cache=tmp_path)
    assert losses(again) == pytest.approx(plain, rel=1e-5)
    assert again.data.num_made == 0
    other = distill(run, run_of(width=4).make_model(), cache=tmp_path)
    assert losses(other) != pytest.approx(plain, rel=1e-3)


def test_an_evaluation_is_the_students_own() -> None:
    run = run_of()
    taught = distill(run, run_of(width=16).make_model(), hidden={"0": "0"})
    assert taught.evaluate is run.evaluate
    student = taught.make_model().eval()
    assert isinstance(student, StudentWithTaps)
    inputs, target = run.evaluate[0]
    output = student(inputs[None])
    assert taught.loss(output, target[None]).equal(run.loss(output, target[None]))
    samples = [run.evaluate[i] for i in range(3)]
    assert taught.collate(samples)[1].equal(torch.stack([t for _, t in samples]))


def test_hidden_layers_are_compared_through_a_projection() -> None:
    run, teacher = run_of(), run_of(width=16).make_model()
    taught = distill(run, teacher, alpha=1.0, hidden={"1": "1"})
    model = taught.make_model()
    assert model.get_parameter("projections.0.weight").shape == (16, 8)
    assert sum(losses(taught)) > sum(losses(distill(run, teacher, alpha=1.0)))
    piece = make_batches(taught, 1).at(0).piece(0)
    objective(taught, call_model(model.train(), piece.inputs), piece).tensor.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    same = distill(run, run_of().make_model(), hidden={"1": "1"}).make_model()
    assert set(same.state_dict()) == {f"student.{name}" for name in run.make_model().state_dict()}


class NamedOutputs(nn.Module):
    """A model whose outputs have the names that hidden layers have elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"logits": self.head(hidden), "hidden": hidden}


@pytest.mark.parametrize("layers", [{}, {"body": "body"}])
def test_outputs_may_have_any_names(layers: dict[str, str]) -> None:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target) + output["hidden"].square().mean()

    run = dataclasses.replace(run_of(), model=lambda: NamedOutputs(4), loss=loss)
    plain, taught = losses(run), losses(distill(run, NamedOutputs(8), alpha=1e-9, hidden=layers))
    assert taught == pytest.approx(plain, rel=1e-5)


def test_records_tell_teachers_apart() -> None:
    one, other = (distill(run_of(), run_of(width=w).make_model()) for w in (4, 16))
    assert one.loss.__qualname__ != other.loss.__qualname__
    assert "temperature 2, alpha 0.5" in one.loss.__qualname__


@pytest.mark.parametrize(
    ("teacher", "given", "words"),
    [
        ({"num_classes": 5}, {}, r"\[2, 5\], and the student \[2, 3\]"),
        ({}, {"hidden": {"nine": "0"}}, "no layer 'nine'. Known: 0"),
        ({}, {"hidden": {"0": "zero"}}, "no layer 'zero'"),
        ({}, {"alpha": 0.0}, "alpha=0"),
        ({}, {"alpha": 1.5}, "alpha=1.5"),
        ({}, {"temperature": 0.0}, "temperature=0"),
    ],
)
def test_what_does_not_fit_is_refused(teacher: Any, given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        distill(run_of(), run_of(**teacher).make_model(), **given)


def test_a_run_that_no_teacher_can_be_part_of_is_refused() -> None:
    run, teacher = run_of(), run_of().make_model()
    own = dataclasses.replace(run, loss=None, step=lambda batch: None, evaluate=None, metrics={})
    with pytest.raises(UsageError, match="a step of its own"):
        distill(own, teacher)
    stream = dataclasses.replace(run, data=lambda: iter([run.data[0]]))
    with pytest.raises(UsageError, match="is a stream"):
        distill(stream, teacher)


def test_a_teacher_of_other_inputs_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be called with the student's inputs"):
        distill(run_of(), nn.Linear(7, 3))
