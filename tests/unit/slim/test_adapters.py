"""LoRA through peft: only adapters are trained, peft loads them, and weights can take them up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.slim.adapters import read_lora
from shoal.system.fork_server import needs_no_traceback
from tests import zoo

full = pytest.mark.full
LORA = {"r": 4, "alpha": 8, "targets": ["query_key_value", "widen"]}


def adapted(**more: Any) -> shoal.Run:
    return shoal.slim.adapt(zoo.gpt(), lora={**LORA, **more})


def trained(run: shoal.Run) -> nn.Module:
    """The run's model with other adapters than those that it begins with."""
    model, generator = run.make_model().eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.2 * torch.randn(p.shape, generator=generator)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output = model(zoo.tokens())
    found: Tensor = getattr(output, "logits", output)
    return found


def test_peft_loads_what_was_trained(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run = shoal.slim.adapt(zoo.gpt(), lora=LORA, head={"norm": lambda: nn.LayerNorm(32)})
    model = trained(run)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.startswith("norm.") for name in names) and names
    shoal.slim.save_adapters(model, tmp_path / "out")
    expected = logits(model)
    base = zoo.gpt().make_model()
    assert not torch.allclose(logits(base.eval()), expected, atol=1e-2)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(logits(loaded), expected)
    merged = shoal.slim.merge_adapters(model)
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert list(merged.state_dict()) == list(zoo.gpt().make_model().state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@full
def test_a_configuration_of_peft_is_taken_as_it_is(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_rslora=True, bias="lora_only")
    model = trained(shoal.slim.adapt(zoo.llama(), lora=config))
    shoal.slim.save_adapters(model, tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(zoo.llama().make_model(), tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert config.inference_mode is False  # the caller's own


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"rank": 4}, r"lora: there is no 'rank'"),
        ({"r": 0, "targets": ["widen"]}, "r"),
        ({"r": 4}, "target_modules"),
        ({"r": 4, "targets": ["wieden"]}, r"Linear layers: .*widen"),
        ("yes", "Give a peft.LoraConfig, or a mapping"),
    ],
)
@full
def test_bad_input_is_refused(lora: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        shoal.slim.adapt(zoo.gpt(), lora=lora).make_model()
    assert needs_no_traceback(refused.value)


@full
def test_what_would_change_the_base_or_has_no_effect_is_refused() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(UsageError, match="init_lora_weights='pissa' changes the weights"):
        read_lora(peft.LoraConfig(init_lora_weights="pissa"))
    with pytest.raises(UsageError, match="freeze has no effect with lora"):
        shoal.slim.adapt(zoo.gpt(), lora=LORA, freeze=["embed"])
    twice = shoal.slim.adapt(adapted(), lora=LORA)
    with pytest.raises(UsageError, match="has adapters of peft already"):
        twice.make_model()
    saves = peft.LoraConfig(r=2, target_modules=["widen"], modules_to_save=["haed"])
    with pytest.raises(UsageError, match=r"modules_to_save has 'haed', .*'head'\?"):
        shoal.slim.adapt(zoo.gpt(), lora=saves).make_model()


@full
def test_a_weight_that_others_use_takes_up_no_adapter() -> None:
    model = trained(adapted(targets=["head"]))  # which is the embedding, too
    with pytest.raises(UsageError, match="adapter of head cannot be merged: another part"):
        shoal.slim.merge_adapters(model)


def test_a_model_without_adapters_has_none_to_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no adapters"):
        shoal.slim.save_adapters(zoo.gpt().make_model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
