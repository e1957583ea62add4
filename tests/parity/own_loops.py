"""Own loops on the pool's ranks: they keep state, freeze layers, and go on from checkpoints."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shoal
from shoal.comm.mesh import Mesh
from shoal.storage.object_store import open_store
from shoal.training.checkpointing import Checkpointer, CheckpointSettings, origin_of
from shoal.training.own_loop import CustomLoop
from shoal.training.recipe import provenance
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from tests.parity.runs import GivenSeat

WIDTH = 64


def run_of(**changes: Any) -> shoal.Run:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
    run = shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        ),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(x, x[:, :1]),
        batch_size=8,
        steps=12,
    )
    return dataclasses.replace(run, **changes)


def trainer_of(mesh: Mesh, plan: str, directory: str | None = None) -> Trainer:
    run = run_of(save_every=4 if directory else None)
    resolved, seat = resolve(run, plan, mesh.num_ranks), GivenSeat(mesh)
    checkpointer = None
    if directory is not None:
        fields = {name: field["value"] for name, field in provenance(run, {}).items()}
        origin = origin_of("own_loops", fields, resolved, run)
        checkpointer = Checkpointer(
            CheckpointSettings(open_store(directory), origin, others_may_write=True), seat.emit
        )
    return Trainer(run, resolved, seat, checkpointer=checkpointer, loop=CustomLoop(recovers=False))


def own(tensor: Tensor) -> Tensor:
    """A copy of what this rank holds; a pipeline's rank has stand-ins that are expanded."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    return torch.empty(held.shape, dtype=held.dtype).copy_(held)


def keep(mesh: Mesh, plan: str, directory: str, until: int) -> dict[str, Any]:
    """Train with averages and a scheduler of the loop's own, from the last checkpoint on."""
    with trainer_of(mesh, plan, directory) as trainer:
        weights, state = [*trainer.model.parameters()], trainer.state
        state["ema"] = [p.detach().clone() for p in weights]
        state["steps"] = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 3, gamma=0.5)
        for info in trainer:
            with torch.no_grad():
                for average, weight in zip(state["ema"], weights, strict=True):
                    average.lerp_(weight.detach(), 0.1)
            state["steps"].step()
            if info.step == until:
                break
        found = [own(tensor) for tensor in (*weights, *state["ema"])]
        return {"tensors": found, "rate": trainer.optimizer.param_groups[0]["lr"]}


def freeze(mesh: Mesh, plan: str) -> dict[str, Any]:
    """Train with a layer that is frozen for some steps."""
    with trainer_of(mesh, plan) as trainer:
        for info in trainer:
            if info.step in (3, 8):
                trainer.model[2].requires_grad_(info.step == 8)
        return {"tensors": [own(p) for p in trainer.model.parameters()]}


def differ(mesh: Mesh, plan: str) -> None:
    """The last rank changes its rate after a step."""
    with trainer_of(mesh, plan) as trainer:
        for info in trainer:
            if info.step == 5 and mesh.rank == mesh.num_ranks - 1:
                trainer.optimizer.param_groups[0]["lr"] = 0.25
