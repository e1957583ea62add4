"""A tiny Llama that learns Shakespeare, and then, by LoRA, to say how words are spoken.

    shoal train recipes/dialect.py:base
    shoal train recipes/dialect.py:spoken --set begin_from=runs/dialect-base-1
    shoal checkpoint export runs/dialect-spoken-1 adapter --to peft \\
        --like recipes/dialect.py:spoken --set begin_from=runs/dialect-base-1

A token is a character. `base` is the whole model, 0.8 million weights. `spoken` begins with what
it learnt and reads another text, the CMU dictionary, a word and its phonemes a line; it trains
adapters of 6 % as many weights, which are a directory of 190 KB for peft.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

ALPHABET = "".join(map(chr, range(128)))
LENGTH = 64


def llama(layers: int, width: int) -> nn.Module:
    transformers = shoal.errors.require("transformers", extra="transformers")
    config = transformers.LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def loss(output: object, target: Tensor) -> Tensor:
    logits: Tensor = output.logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def shakespeare() -> Tensor:
    text = shoal.data.catalog.text("shakespeare")
    return torch.tensor([ord(letter) for letter in text.alphabet])[text.tokens.long()]


def dictionary() -> Tensor:
    """Lines such as `cat K AE1 T`, in an order without an alphabet's."""
    words = shoal.data.catalog.spelling()
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    lines = (" ".join((words[at][0], *words[at][1])) for at in order)
    content = "\n".join(lines).encode("ascii", "replace")
    return torch.from_numpy(np.frombuffer(content, np.uint8).astype(np.int64))


def _run(tokens: Tensor, layers: int, width: int, rate: float) -> shoal.Run:
    cut = len(tokens) * 99 // 100
    held_out = tokens[cut:][: 256 * LENGTH + 1]
    return shoal.Run(
        model=lambda: llama(layers, width),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=rate, betas=(0.9, 0.98)),
        schedule=shoal.schedules.cosine(warmup=10),
        clip=1.0,
        data=shoal.data.windows(tokens[:cut], LENGTH),
        evaluate=shoal.data.windows(held_out, LENGTH),
        batch_size=16,
        steps=200,
        tokenizer=shoal.data.Characters(ALPHABET),
    )


def base(layers: int = 4, width: int = 128) -> shoal.Run:
    return _run(shakespeare(), layers, width, rate=3e-3)


def spoken(
    begin_from: str = "runs/dialect-base-1", layers: int = 4, width: int = 128, r: int = 8
) -> shoal.Run:
    return shoal.slim.adapt(
        _run(dictionary(), layers, width, rate=1e-2),
        begin_from=begin_from,
        lora={"r": r, "alpha": 2 * r, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    )
