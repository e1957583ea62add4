"""Caches of keys and values, whatever class they are: stages do without those of others."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import PlanError
from shoal.parallel.pipeline.calls import CallInterceptor
from shoal.parallel.pipeline.placeholders import AbsentObject, in_use_by
from shoal.parallel.pipeline.stage_runner import StageRunner
from shoal.training.run import call_model
from tests import zoo
from tests.unit.parallel.test_stages import WIDTH, Layers, compare, examples, plan_for


@dataclass
class Cache:
    """Filled by layers; nobody reads it in training."""

    kept: list[Tensor] = field(default_factory=list)


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        y = self.inner(x).tanh()
        cache.kept.append(y)
        return y, cache


class Decoder(Layers):
    """Makes a cache in its first submodule, or hands one of its own through all of them."""

    def __init__(self, own: bool, reads: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Caches() for _ in range(4))
        self.own, self.reads = own, reads

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache = Cache() if self.own else None
        for layer in self.layers:
            x, made = layer(x, cache)
            cache = cache or (None if self.own else made)
        if self.reads:
            assert cache is not None
            x = x + cache.kept[0]
        return {"y": self.d(x), "cache": cache}


class MakesOne(Layers):
    """Every submodule makes a cache of its own, and the first is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caches() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        caches = []
        for layer in self.layers:
            x, made = layer(x)
            caches.append(made)
        return {"y": self.d(x), "cache": caches[0], "caches": (caches[1], caches[2])}


def y_of(output: dict[str, Any]) -> Tensor:
    total: Tensor = output["y"].square().sum()
    return total


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("kind", [partial(Decoder, True), MakesOne])
def test_a_cache_that_nobody_reads_is_no_hindrance(kind: Any, num_stages: int) -> None:
    torch.manual_seed(0)
    model = kind()
    plan = compare(model, examples(2), num_stages, y_of)
    if num_stages == 4:  # cut within the layers, what they keep is carried
        return
    last = StageRunner(CallInterceptor(model), plan.tape, plan.stages[-1], is_last=True)
    received = [torch.ones(plan.tape.values[n].shape) for n in plan.stages[-1].received]
    output = last(partial(call_model, model, examples(1)[0]), received)
    cache = output["cache"]
    assert type(cache) is AbsentObject and isinstance(cache, Cache)
    with (
        in_use_by("The loss"),
        pytest.raises(PlanError, match="The loss uses a Cache, which is on another rank"),
    ):
        len(cache.kept)


def test_a_cache_that_is_read_is_refused() -> None:
    with pytest.raises(PlanError, match=r"uses a tensor of shape .* submodule layers\.0 made and"):
        plan_for(Decoder(own=True, reads=True), examples(2), 2)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    marks: Any = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=zoo.TOKENS, dropout_rate=0.0, **sizes, **marks)
    return T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: Any = {"d_model": 32, "num_mel_bins": 16, "max_source_positions": 16}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    marks: Any = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = WhisperConfig(vocab_size=zoo.TOKENS, decoder_start_token_id=1, **sizes, **marks)
    return WhisperForConditionalGeneration(config)


def inputs_of(model: str, part: slice) -> dict[str, Tensor]:
    words = zoo.tokens()[part]
    if model == "t5":
        return {"input_ids": words, "decoder_input_ids": words[:, :6]}
    return {"input_features": zoo.normal(16, 32)[part], "decoder_input_ids": words[:, :8]}


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=pytest.mark.full)])
def test_models_with_an_encoder_keep_their_caches(name: str, num_stages: int) -> None:
    """`use_cache` is on by default, and a part that is not cut returns an EncoderDecoderCache."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = {"t5": t5, "whisper": whisper}[name]().train()
    inputs = [inputs_of(name, slice(4 * i, 4 * i + 4)) for i in range(2)]
    compare(model, inputs, num_stages, lambda out: out.logits.square().mean(), tolerance=1e-6)
