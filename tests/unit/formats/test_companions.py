"""What stands beside the weights of a Hugging Face directory comes along in an export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shoal.cli.main import run_here
from shoal.errors import BadCheckpoint
from shoal.formats.companions import origin_directory
from shoal.formats.exported_program import load_weights
from shoal.formats.open_weights import open_foreign
from shoal.formats.weights import ModelWeights


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """As another program left it, with more than Shoal knows of."""
    made = tmp_path / "pretrained"
    made.mkdir()
    save_file({"weight": torch.ones(2, 2)}, made / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "generation_config.json", "secrets.txt"):
        (made / name).write_text(f'{{"name": "{name}"}}')
    return made


def run_that_began_with(origin: Path, run_dir: Path, tensors: dict[str, torch.Tensor]) -> Path:
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"begin_from": str(origin)}))
    save_file(tensors, run_dir / "model.safetensors")
    return run_dir / "model.safetensors"


def exported(weights: Path, out: Path) -> set[str]:
    words = ["checkpoint", "export", str(weights), str(out), "--to", "huggingface"]
    assert run_here(words) == 0
    return {path.name for path in out.iterdir()}


def test_a_tokenizer_comes_along_with_a_run(pretrained: Path, tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(2, 2)}
    weights = run_that_began_with(pretrained, tmp_path / "run", tensors)
    assert exported(weights, tmp_path / "out") == {
        *("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"),
    }
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"name": "tokenizer.json"}'


def test_a_configuration_of_other_tensors_does_not(pretrained: Path, tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(2, 2), "head.weight": torch.zeros(3)}
    weights = run_that_began_with(pretrained, tmp_path / "run", tensors)
    assert "config.json" not in exported(weights, tmp_path / "out")


def test_a_directory_is_its_own_origin(pretrained: Path, tmp_path: Path) -> None:
    assert "tokenizer.json" in exported(pretrained, tmp_path / "out")
    assert origin_directory(tmp_path) is None
    assert origin_directory("s3://bucket/run") is None


def test_weights_with_a_prefix_and_of_another_precision_are_taken(tmp_path: Path) -> None:
    tensors = {"module.weight": torch.ones(2, 3).bfloat16(), "module.bias": torch.ones(2)}
    save_file(tensors, tmp_path / "weights.safetensors")
    found = open_foreign(tmp_path / "weights.safetensors")
    assert found is not None
    model = nn.Linear(3, 2)
    assert load_weights(model, ModelWeights(found)) == "'module.' was cut off its names"
    assert model.weight.dtype == torch.float32 and bool((model.weight == 1).all())
    with pytest.raises(BadCheckpoint, match=r"of another shape: module\.weight"):
        load_weights(nn.Linear(4, 2), ModelWeights(found))
