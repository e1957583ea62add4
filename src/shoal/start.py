"""How a script gets its trainer, whoever started it."""

import os
from collections.abc import Sequence

from shoal.elastic.seat import seat_from_environment
from shoal.hooks import Hook
from shoal.mesh import LauncherSeat, Seat
from shoal.numerics.precision import environment_for
from shoal.plan import Plan
from shoal.run import Run, resolve
from shoal.training import Trainer
from shoal.world import World


def trainer(run: Run, plan: str | Plan | None = None, *, hooks: Sequence[Hook] = ()) -> Trainer:
    """The trainer of this rank, in a script that `shoal run`, torchrun, srun or mpirun started.

    Use it in a `with` block and iterate over it; every rank must do both. Started by `shoal run`, a
    lost rank is replaced while the others go on; other launchers have no spare.
    """
    world = World.from_environment()
    resolved = resolve(run, plan, world.num_ranks)
    os.environ.update(environment_for(resolved.precision))
    seat: Seat = seat_from_environment(resolved) or LauncherSeat(world)
    return Trainer(run, resolved, seat, hooks=hooks)
