"""Emulated devices: a network that takes as long as it is told, on any number of cores.

A sample takes its time, a third of it in forward and the rest in backward. Timers wake up late,
which a device with a queue would not: what follows within 2 ms of the end of one piece of work
counts from that end.
"""

import time
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

LATE_S = 0.002
WIDTH = 32


class Device:
    """Busy for as long as it is told, one piece of work after another."""

    def __init__(self, sample_s: float):
        """`sample_s` is what a sample takes in forward."""
        self.sample_s, self.free_at = sample_s, 0.0

    def work(self, seconds: float) -> None:
        now = perf_counter()
        begun = self.free_at if now - self.free_at < LATE_S else now
        self.free_at = begun + seconds
        time.sleep(max(0.0, self.free_at - now))


class Paced(torch.autograd.Function):
    """The same tensor, after a while; and the same gradient, after another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: Device) -> Tensor:
        ctx.device, ctx.seconds = device, 2 * len(tensor) * device.sample_s
        device.work(len(tensor) * device.sample_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        ctx.device.work(ctx.seconds)
        return gradients[0], None


class OnDevice(nn.Module):
    """A small network on an emulated device."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.device = Device(sample_s)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = Paced.apply(self.layers(x), self.device)  # type: ignore[no-untyped-call]
        return done
