"""A Predictor answers in order, whatever the batches; a model that fails is told of by samples."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import RecipeError, UsageError
from tests.system import used


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(2, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise ValueError("a large number")
        answer: Tensor = self.drop(self.layer(x))
        return answer


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_answers_come_in_order(batch_size: int) -> None:
    model, inputs = Net(), torch.randn(10, 2)
    found = list(shoal.Predictor(model, batch_size=batch_size)(iter(inputs)))
    torch.testing.assert_close(torch.stack(found), model.layer(inputs))
    assert not found[0].requires_grad
    assert model.training and model.drop.training  # as it was


def test_inputs_are_read_as_answers_are_asked_for() -> None:
    read = []

    def inputs() -> Iterator[Tensor]:
        for number in range(100):
            read.append(number)
            yield torch.full((2,), float(number))

    answers = shoal.Predictor(Net(), batch_size=4)(inputs())
    next(answers)
    assert len(read) == 4 and torch.is_grad_enabled()


def test_the_collate_of_the_run_is_used() -> None:
    def collate(samples: list) -> tuple[Tensor, None]:
        longest = max(len(one) for one, _ in samples)
        rows = [torch.nn.functional.pad(one, (0, longest - len(one))) for one, _ in samples]
        return torch.stack(rows), None

    run = shoal.Run(
        **{**vars(used.classifier()), "model": lambda: nn.LazyLinear(1), "collate": collate}
    )
    summed = shoal.Predictor(nn.Flatten(), run, batch_size=2)
    found = list(summed([torch.ones(1), torch.ones(3)]))
    assert [one.tolist() for one in found] == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=f"device '{device}': the model cannot work there"):
        shoal.Predictor(nn.Linear(2, 2), device=device)


def test_samples_that_fail_are_named() -> None:
    inputs = [torch.zeros(2)] * 5 + [torch.full((2,), 200.0)]
    answers = shoal.Predictor(Net(), batch_size=2)(inputs)
    with pytest.raises(RecipeError, match="on samples 4 to 5: ValueError: a large number"):
        list(answers)
    with pytest.raises(UsageError, match="batch_size=0"):
        shoal.Predictor(Net(), batch_size=0)


def test_a_program_of_torch_export_has_one_mode(tmp_path) -> None:
    model = nn.Linear(2, 3)
    sizes = {"input": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(model.eval(), (torch.ones(4, 2),), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "model.pt2")
    inputs = torch.randn(5, 2)
    found = list(shoal.Predictor(tmp_path / "model.pt2", batch_size=3)(inputs))
    torch.testing.assert_close(torch.stack(found), model(inputs))
    again = shoal.load(tmp_path / "model.pt2", used.classifier)  # which is not needed
    torch.testing.assert_close(again(inputs), model(inputs))


def test_a_source_gives_numbers_of_samples() -> None:
    source = used.classifier().evaluate
    model = nn.Linear(4, 1)
    batches = list(shoal.Predictor(model, batch_size=50).batches(source))
    assert [list(ids[:1]) for ids, _ in batches] == [[0], [50], [100]]
    assert batches[-1].columns["output"].shape == (1, 1)
