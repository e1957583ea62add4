"""Runs with callbacks on the ranks of the pool: averages, rates that follow a metric, parts."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.comm.mesh import Mesh
from shoal.storage.object_store import open_store
from shoal.training.checkpointing import Checkpointer, CheckpointSettings, origin_of
from shoal.training.recipe import provenance
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from tests.parity import own_loops
from tests.parity.runs import GivenSeat


def loss(output: Tensor, target: Tensor) -> dict[str, Any]:
    """The parts are those of each piece: a mean, and a sum with a weight of its own."""
    error = output - target
    return {
        "loss": F.mse_loss(output, target),
        "absolute": error.abs().mean(),
        "positive": (error.clamp(min=0).sum(), (error > 0).sum().clamp(min=1)),
    }


def run_of(**changes: Any) -> shoal.Run:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(7))
    run = own_loops.run_of(
        loss=loss,
        evaluate=shoal.data.tensors(x, x[:, :1]),
        evaluate_every="epoch",
        steps=18,
        callbacks=[
            shoal.callbacks.EMA(0.8, evaluate=True),
            shoal.callbacks.ReduceOnPlateau("ema_loss", factor=0.5, patience=1, min_delta=0.2),
        ],
    )
    return dataclasses.replace(run, **changes)


class Whole(shoal.Callback):
    """Keeps the model at the end, and the average as this rank holds it."""

    found: dict[str, Any] = {}

    def on_end(self, trainer: Any, info: Any) -> None:
        Whole.found = {"model": trainer.whole_model(), "step": info.step, "rate": info.rate}


def train(mesh: Mesh, plan: str, directory: str, until: int = 99) -> dict[str, Any]:
    """From the last checkpoint on, up to a step; what came of it."""

    class Until(shoal.Callback):
        def on_step(self, trainer: Any, info: Any) -> None:
            if info.step == until:
                trainer.stop("for now")

    base = run_of()
    run = dataclasses.replace(base, callbacks=[*base.callbacks, Until(), Whole()])
    resolved, seat = resolve(run, plan, mesh.num_ranks), GivenSeat(mesh)
    fields = {name: field["value"] for name, field in provenance(run, {}).items()}
    settings = CheckpointSettings(
        open_store(directory), origin_of("callback_runs", fields, resolved, run)
    )
    checkpointer = Checkpointer(settings, seat.emit)
    with Trainer(run, resolved, seat, checkpointer=checkpointer) as trainer:
        infos = list(trainer)
    return {
        "losses": [info.loss for info in infos],
        "parts": [info.parts for info in infos],
        "evaluations": [info.evaluation for info in infos if info.evaluation],
        **Whole.found,
    }
