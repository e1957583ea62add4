"""Recipes and a script for processes that a launcher starts."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

import shoal
from tests.system.tiny import line


def unlike() -> shoal.Run:
    """On each rank another, without a word of it on the command line."""
    return replace(line(), clip=1.0 + int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def fails_on_one(at: int = 3) -> shoal.Run:
    """The loss of rank 1 fails after some steps."""
    run, calls = line(), iter(range(1000))
    plain = run.loss
    assert plain is not None

    def loss(output: torch.Tensor, target: torch.Tensor) -> object:
        if next(calls) == at and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            raise KeyError("a key of this rank's own")
        return plain(output, target)

    return replace(run, loss=loss)


def fails_to_load() -> shoal.Run:
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
        raise OSError("this host has no data")
    return line()


class Counter:
    """A callback that says on rank 0 how many steps it saw."""

    def on_step(self, info: object, control: object = None) -> None:
        print("called")


def told() -> shoal.Run:
    return replace(line(), callbacks=(Counter(),))


if __name__ == "__main__":
    with shoal.trainer(line()) as trainer:
        losses = [info.loss for info in trainer]
    names = {Path(f"{task}/comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert not [name for name in names if "gloo" in name], names
    if trainer.step == 8 and os.environ.get("LOCAL_RANK", os.environ.get("PMI_RANK", "0")) == "0":
        sys.stdout.write(f"losses {losses} of {torch.get_num_threads()} thread\n")
