"""How a script gets its trainer, under any launcher."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint.find import list_steps
from shoal.checkpoint.manifest import Origin
from shoal.comm.mesh import LauncherSeat, Seat
from shoal.elastic.seat import SupervisedSeat, seat_from_environment
from shoal.errors import PlanError, UsageError
from shoal.events.step import Hook
from shoal.numerics.precision import environment_for
from shoal.plans.plan import Plan
from shoal.storage.object_store import open_store
from shoal.storage.store import Store
from shoal.training.checkpointing import Checkpointer, CheckpointSettings, origin_of
from shoal.training.own_loop import CustomLoop
from shoal.training.recipe import provenance
from shoal.training.resume import newest, plan_to_resume, refuse_changes, refuse_used_store
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World


def trainer(
    run: Run,
    plan: str | Plan | None = None,
    *,
    hooks: Sequence[Hook] = (),
    checkpoints: str | Path | None = None,
    resume: bool = False,
) -> Trainer:
    """The trainer of this rank, in a script that `shoal run`, torchrun, srun or mpirun started.

    Use it in a `with` block and iterate over it; every rank must do both. Started by `shoal run`, a
    lost rank is replaced while the others go on; other launchers have no spare.

    With `checkpoints`, a directory that all ranks see or a URL, it saves every `save_every` steps
    and at the end, and when SIGTERM stops the loop (`stopped` is then True); with `resume` as well,
    it goes on from the newest good one there, if any.
    """
    world = World.from_environment()
    store = None if checkpoints is None else open_store(checkpoints)
    if store is None and (resume or run.save_every is not None):
        raise UsageError(
            "resume and save_every need a place. Give shoal.trainer(..., checkpoints=DIRECTORY)."
        )
    fields: dict[str, Any] = {}
    found = None  # to go on from
    if store is not None:
        fields = {name: field["value"] for name, field in provenance(run, {}).items()}
    if store is not None and list_steps(store):
        # A spare that comes later finds those of its own run; its number is above the seats'.
        if not resume and world.rank < world.num_ranks:
            refuse_used_store(store)
        found = newest(store)
    if found is not None:
        refuse_changes(fields, run, found.origin)
        text = None if plan is None else str(plan)
        resolved = plan_to_resume(run, text, world.num_ranks, found.origin)
    else:
        resolved = resolve(run, plan, world.num_ranks)
    if resolved.num_servers:
        raise PlanError(
            f"The plan {str(resolved)!r} needs parameter servers, and none are started for a "
            "script. Train a recipe with `shoal train RECIPE --plan ...`, which does, or give "
            "shoal.trainer a plan without sync=server."
        )
    os.environ.update(environment_for(resolved.precision))
    supervised = seat_from_environment(resolved)
    if supervised is not None:
        supervised.stop_on_term()
    seat: Seat = supervised or LauncherSeat(world)
    loop = CustomLoop(recovers=isinstance(seat, SupervisedSeat) and seat.recovers)
    try:
        checkpointer = None
        if store is not None:
            made = origin_of(sys.argv[0], fields, resolved, run)
            checkpointer = _checkpointer(seat, store, made, resume)
        return Trainer(run, resolved, seat, hooks=hooks, checkpointer=checkpointer, loop=loop)
    except BaseException:
        seat.close()  # which gives SIGTERM back
        raise


def _checkpointer(seat: Seat, store: Store, made: Origin, resume: bool) -> Checkpointer:
    """What saves, also when SIGTERM stops the loop."""
    if isinstance(seat, LauncherSeat):
        seat.stop_on_term()
    settings = CheckpointSettings(store, made, others_may_write=True, resumes=resume)
    return Checkpointer(settings, seat.emit)
