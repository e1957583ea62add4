"""What a step of one process runs of ours, counted in calls; `bench overhead` has the seconds."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.comm.mesh import LauncherSeat
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World

OURS = str(Path(shoal.__file__).parent)
MOST_CALLS = 155  # of our functions in a step; each takes a tenth of a microsecond and more


def small_run() -> Run:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1024, 8, generator=generator)
    return Run(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        loss=cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        data=shoal.data.tensors(inputs, torch.randint(0, 3, (1024,), generator=generator)),
        batch_size=8,
        steps=100,
    )


def calls_of_steps(steps: Iterator[Any], num_steps: int) -> list[tuple[int, int]]:
    """Of each step, the calls of our functions and those into numpy."""
    counts = [0, 0]

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            counts[0] += frame.f_code.co_filename.startswith(OURS)
        elif event == "c_call":
            counts[1] += "numpy" in str(getattr(called, "__module__", "")) or "numpy" in str(called)

    found = []
    for _ in range(num_steps):
        counts[:] = 0, 0
        sys.setprofile(count)
        next(steps)
        sys.setprofile(None)
        found.append((counts[0], counts[1]))
    return found


def test_a_step_calls_little_of_ours_and_nothing_of_numpy() -> None:
    run = small_run()
    with Trainer(run, resolve(run, "data=1", 1), LauncherSeat(World())) as trainer:
        steps = iter(trainer)
        for _ in range(3):  # the first is watched, and a window of rows is gathered
            next(steps)
        found = calls_of_steps(steps, 10)
    ours, of_numpy = (min(counts) for counts in zip(*found, strict=True))
    assert ours <= MOST_CALLS, found
    assert of_numpy == 0, found
