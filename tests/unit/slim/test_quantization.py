"""Quantised models: what is rounded and what is kept, and that files give back the same model."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.errors import BadCheckpoint, UsageError
from shoal.formats import quantized
from shoal.slim.quantization import (
    layers_kept,
    quantize_in_training,
    quantize_model,
    scales_of_inputs,
    unround,
)
from shoal.storage.files import umask
from shoal.training.load import load
from tests import zoo


class Tied(nn.Module):
    """Two layers of their own, one that groups of 32 do not divide, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.first, self.odd = nn.Linear(64, 50), nn.Linear(50, 64)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        logits: torch.Tensor = self.head(x + self.odd(self.first(x).relu()))
        return logits


def run_of() -> shoal.Run:
    tokens = torch.arange(160).view(16, 10) % 20
    return dataclasses.replace(zoo.mlp(), model=Tied, data=shoal.data.tensors(tokens, tokens))


@pytest.mark.parametrize("to", ["int8", "dynamic-int8", "qat-int8"])
def test_a_layer_with_one_input_stays_as_it_is(to: str) -> None:
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    assert layers_kept(model, to) == ["0"]
    quantize_model(model, to)
    assert model(torch.ones(5, 1)).shape == (5, 1)
    with pytest.raises(UsageError, match="with more than one input"):
        quantize_model(nn.Sequential(nn.Linear(1, 8)), to)


class Calls(nn.Module):
    """One layer is called with rows and with a batch of them, another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(self.first(x).relu())
        result: Tensor = y + self.both(y[:, None]).squeeze(1)
        return result


def test_static_scales_come_from_the_data_and_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    run = dataclasses.replace(
        zoo.mlp(), model=Calls, data=shoal.data.tensors(inputs, inputs), batch_size=16
    )
    model = run.make_model().eval()
    scales = scales_of_inputs(run, model)
    assert scales.keys() == {"first"}
    assert float(scales["first"]) == pytest.approx(float(inputs.abs().max()) / 127, rel=1.1)
    assert layers_kept(model, "static-int8", scales) == ["both", "idle"]
    with torch.no_grad():
        plain = model(inputs)
        quantize_model(model, "static-int8", scales)
        rounded = model(inputs)
        assert not rounded.equal(plain) and (rounded - plain).abs().max() < 0.05 * plain.abs().max()
        quantized.write_quantized(model, tmp_path / "model.safetensors")
        assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
        again = load(tmp_path, run)
        assert again(inputs).equal(rounded)
        far = again(100 * inputs).abs().max()
        assert far < 10 * rounded.abs().max(), "inputs beyond the scale are cut off"


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=24).filter(lambda x: len(x) % 2 == 0))
def test_halves_of_bytes_come_back(values: list[int]) -> None:
    part = torch.tensor([values, values[::-1]], dtype=torch.int8)
    assert quantized._fits_half_a_byte("w_qdata", part)
    assert quantized._join_halves(quantized._halve(part)).equal(part)
    assert quantized._halve(part).numel() == part.numel() // 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("to", "kept"),
    [
        ("int8", ["embed", "head"]),
        ("int4", ["embed", "odd", "head"]),
        ("dynamic-int8", ["embed", "head"]),
    ],
)
def test_a_file_gives_back_the_same_model(tmp_path: Path, to: str, kept: list[str]) -> None:
    run = run_of()
    model, tokens = run.make_model().eval(), run.data.inputs
    with torch.no_grad():
        plain = model(tokens)
        assert layers_kept(model, to) == kept
        quantize_model(model, to)
        rounded = model(tokens)
        assert not rounded.equal(plain) and (rounded - plain).abs().max() < 0.03 * plain.abs().max()
        quantized.write_quantized(model, tmp_path / "model.safetensors")
        assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
        again = load(tmp_path, run)
        assert again(tokens).equal(rounded)
    assert isinstance(again, Tied) and again.head.weight is again.embed.weight
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < sum(p.nbytes for p in run.make_model().parameters())
    other = dataclasses.replace(run, model=lambda: nn.Sequential(nn.Linear(64, 50)))
    with pytest.raises(BadCheckpoint, match="not of the recipe's model"):
        load(tmp_path, other)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content.replace(b"Int", b"Iot"))
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        load(tmp_path, run)


@pytest.mark.full
def test_rounding_in_training_keeps_names_and_is_taken_away() -> None:
    run = run_of()
    rounded = quantize_in_training(run).make_model()
    plain = run.make_model()
    assert list(rounded.state_dict()) == list(plain.state_dict())
    tokens = run.data.inputs
    assert not rounded(tokens).equal(plain(tokens))
    rounded(tokens).sum().backward()
    assert all(p.grad is not None for p in rounded.parameters())
    assert unround(rounded)(tokens).equal(plain(tokens))


@pytest.mark.full
def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="no layer that can be quantised"):
        quantize_model(nn.Sequential(nn.Conv2d(3, 4, 3)), "int8")
