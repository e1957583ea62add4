"""A small model with something to prune and to quantise, for tests of verbs."""

import os
import signal
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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


class KillTeacher:
    """Kills a process of the teacher's after a step, on the first rank."""

    def __init__(self, run: shoal.Run, which: str):
        self._address, self._which = run.collate._teacher._address, which

    def on_step(self, trainer: Any, info: Any) -> None:
        if not self._which or info.step != 10 or trainer.rank:
            return
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        keeper = struct.unpack("3i", credentials)[0]
        workers = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(keeper if self._which == "keeper" else int(workers[0]), signal.SIGKILL)


def taught(teacher: str, teachers: int = 1, kill: str = "") -> shoal.Run:
    run = shoal.slim.distill(small(width=8), teacher, teacher_recipe=small, teachers=teachers)
    return replace(run, callbacks=[KillTeacher(run, kill)])
