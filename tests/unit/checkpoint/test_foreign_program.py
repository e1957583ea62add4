"""A model as a program of its own: it gives what the model gives, for any number of samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.load import CheckpointReader
from shoal.errors import BadCheckpoint, RecipeError, UsageError
from shoal.formats import exported_program
from shoal.formats.exported_program import (
    ExampleInputs,
    example_inputs,
    export_onnx,
    export_pt2,
    load_weights,
)
from shoal.formats.weights import ModelWeights
from tests.unit.checkpoint.made import NAME, make


class Net(nn.Module):
    """BatchNorm and dropout, which behave otherwise in training; a buffer that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.last(self.drop(self.norm(self.first(x)).relu())) * self.scale
        return y if shift is None else y + shift


class Fixed(nn.Module):
    """Knows how many samples come."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + torch.rand_like(x)


class Caching(nn.Module):
    """Answers as models of transformers do: with a cache beside the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.last = SimpleNamespace(use_cache=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache = {"cache": SimpleNamespace(keys=x)} if self.config.use_cache else {}
        return {"logits": self.last(x), **cache}


class Counting(nn.Module):
    """Asks for the number of samples by len(x), which torch.export takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(1, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x + self.first.expand(len(x), -1))
        return found


def test_a_program_that_counts_samples_takes_any_number(tmp_path: Path) -> None:
    model = Counting()
    assert export_pt2(model, inputs(), tmp_path / "model.pt2").any_batch
    found = exported_program.load_program(tmp_path / "model.pt2")
    torch.testing.assert_close(found(x := torch.randn(7, 4)), model(x))


def test_a_program_holds_no_cache(tmp_path: Path) -> None:
    model, given = Caching(), inputs()
    assert export_pt2(nn.Sequential(model), given, tmp_path / "model.pt2").any_batch
    found = exported_program.load_program(tmp_path / "model.pt2")(*given.args)
    torch.testing.assert_close(found["logits"], model(*given.args)["logits"])
    assert model.config.use_cache, "the model itself answers as before"


def trained(model: nn.Module, directory: Path) -> ModelWeights:
    """A checkpoint of a model whose buffers have moved, as training keeps it."""
    model(torch.randn(5, 4))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named = {f"model.{name}": tensor.detach().clone() for name, tensor in state.items()}
    return ModelWeights(CheckpointReader(make(directory, named), NAME))


def inputs() -> ExampleInputs:
    return example_inputs(torch.randn(3, 4), 3)


def test_weights_go_into_a_model(tmp_path: Path) -> None:
    source, target = Net(), Net()
    load_weights(target, trained(source, tmp_path))
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


def test_weights_of_another_model_do_not(tmp_path: Path) -> None:
    weights = trained(Net(), tmp_path)
    with pytest.raises(
        BadCheckpoint, match=r"not in it: 0\.bias, 0\.weight; not in the model: first"
    ):
        load_weights(nn.Sequential(nn.Linear(4, 8)), weights)
    larger = Net()
    larger.last = nn.Linear(8, 5)
    with pytest.raises(
        BadCheckpoint, match=r"of another shape: last\.bias, last\.weight\)\. Give the recipe"
    ):
        load_weights(larger, weights)
    smaller = Net()
    del smaller.norm
    with pytest.raises(BadCheckpoint, match=r"not in the model: norm\.bias, "):
        load_weights(smaller, weights)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_a_program_gives_what_the_model_gives(form: str, tmp_path: Path) -> None:
    model = Net()
    load_weights(model, trained(Net(), tmp_path / "from"))
    x, shift = torch.randn(3, 4), torch.randn(3, 3)
    given = {"tensor": x, "tuple": (x, shift), "dict": {"x": x, "shift": shift}}[form]
    called = example_inputs(given, 3)
    written = export_pt2(model, called, tmp_path / "m.pt2")
    assert written.any_batch
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    for some in (called, called.first(2), example_inputs(torch.randn(7, 4), 7)):
        if form == "tensor" or some.num_samples != 7:
            wanted = model(*some.args, **some.kwargs)
            assert torch.allclose(loaded(*some.args, **some.kwargs), wanted, atol=1e-6)


def test_a_fixed_number_of_samples_is_told(tmp_path: Path) -> None:
    written = export_pt2(Fixed(), inputs(), tmp_path / "m.pt2")
    assert not written.any_batch
    torch.export.load(tmp_path / "m.pt2").module()(torch.randn(3, 4))


def test_a_model_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="another result than the model"):
        export_pt2(Random(), inputs(), tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_a_program_that_gives_fewer_results_is_refused() -> None:
    with pytest.raises(RecipeError, match="another result than the model"):
        exported_program._compare(Fixed(), lambda given: [], inputs(), "onnxruntime")


def test_a_model_that_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    class Branches(Fixed):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if x.sum() > 0 else x

    with pytest.raises(RecipeError, match=r"torch\.export cannot trace the model"):
        export_pt2(Branches(), inputs(), tmp_path / "m.pt2")


def test_onnx_gives_what_the_model_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")  # read when it is imported
    reason = "needs the extras onnx and test"
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module, reason=reason)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread for a progress bar
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    model = Net()
    load_weights(model, trained(Net(), tmp_path / "from"))
    written = export_onnx(model, inputs(), tmp_path / "m.onnx")
    assert written == (True, "onnxruntime")
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"))
    x = torch.randn(7, 4)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "m.onnx"]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(UsageError, match=r"pip install 'shoal-ml\[onnx\]'"):
        export_onnx(Net(), inputs(), tmp_path / "m.onnx")
