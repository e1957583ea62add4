"""A small model with something to prune and to quantise, for tests of verbs."""

import time
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(1) == target).float().mean()


def small(width: int = 80, classes: int = 4, pause: float = 0.0) -> shoal.Run:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        time.sleep(pause)
        return F.cross_entropy(logits, target)

    generator = torch.Generator().manual_seed(0)
    target = torch.arange(256) % 4
    inputs = torch.randn(256, 16, generator=generator) + F.one_hot(target, 16) * 3.0
    return shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes)
        ),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        data=shoal.data.tensors(inputs, target % classes),
        evaluate=shoal.data.tensors(inputs[:64], target[:64] % classes),
        metrics={"accuracy": accuracy},
        batch_size=16,
        steps=40,
    )


def unmeasured() -> shoal.Run:
    def fails(logits: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no number")

    return replace(small(), metrics={"accuracy": fails})


def llama() -> shoal.Run:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    tokens = torch.arange(128).view(16, 8) % 32
    return shoal.Run(
        model=lambda: LlamaForCausalLM(config),
        loss=lambda output, target: F.cross_entropy(output.logits.mT, target),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        data=shoal.data.tensors(tokens, tokens),
        batch_size=4,
        steps=4,
    )
