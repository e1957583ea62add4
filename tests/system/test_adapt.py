"""From a trained base to LoRA, resumed, exported for peft and merged, by commands alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.slim.figures import load_trained
from tests import zoo
from tests.system.test_slim_verbs import Command, Done, command  # noqa: F401 (a fixture)

RECIPES = Path(__file__).with_name("adapt_recipes.py")
BASE, LORA = f"{RECIPES}:base", f"{RECIPES}:lora"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(zoo.tokens()).logits
    return found


def done(found: Done) -> Done:
    assert found.exit_code == 0, found.errors
    return found


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_base_its_adapters_and_what_others_load(
    command: Command,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread for a progress bar
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    done(command("train", BASE, "--set", "steps=4", "--run-dir", "base", "--plan", "data=2"))
    begin = ("--set", f"begin_from={tmp_path / 'base'}")
    for name, resume in (("whole", ()), ("parts", ("--resume",))):
        where = ("--run-dir", name, "--plan", "data=2 zero=1", "--set", "save_every=2")
        steps = 3 if resume else 6
        done(command("train", LORA, *begin, *where, "--set", f"steps={steps}"))
        if resume:
            done(command("train", LORA, *begin, *where, "--set", "steps=6", *resume))
    settings = {"begin_from": str(tmp_path / "base")}
    run = shoal.training.recipe.load_recipe(LORA, settings)
    trained, again = (load_trained(run, tmp_path / name).model for name in ("whole", "parts"))
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    base = shoal.load(tmp_path / "base", BASE)
    for name, tensor in base.state_dict().items():  # which was not trained
        inside = name.replace("q_proj.weight", "q_proj.base_layer.weight")
        assert torch.equal(tensor, trained.state_dict()[inside])

    like = ("--like", LORA, *begin)
    done(command("checkpoint", "export", "whole", "adapter", "--to", "peft", *like))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(trained))
    merge = ("--to", "huggingface", "--merge", *like)
    done(command("checkpoint", "export", "whole", "merged", *merge))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(trained), atol=1e-5)
    refused = command("checkpoint", "export", "whole", "x", "--to", "huggingface", *like)
    assert refused.exit_code == 2 and "Add --merge" in refused.errors
    refused = command("train", LORA, *begin, "--run-dir", "x", "--from", str(tmp_path / "base"))
    assert refused.exit_code == 2  # its layers have other names
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter", "merged"}
    assert not (tmp_path / "x" / "checkpoints").exists()


def test_a_misspelt_pattern_is_said_before_a_rank_starts(
    command: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    found = command("train", LORA, "--set", "freeze=embd", "--plan", "data=2")
    assert found.exit_code == 2
    assert "freeze: 'embd' matches no parameter. Did you mean 'embed'?" in found.errors
    assert "Traceback" not in found.errors


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--to", "peft"), "--to peft needs the model"),
        (("--to", "safetensors", "--merge"), "--merge needs the model"),
        (("--to", "peft", "--merge", "--like", BASE), "--merge leaves none"),
    ],
)
@pytest.mark.full
def test_exports_that_cannot_be(
    command: Command,  # noqa: F811
    words: tuple[str, ...],
    why: str,
) -> None:
    found = command("checkpoint", "export", "nowhere", "out", *words)
    assert found.exit_code == 2 and why in found.errors
