"""The mesh: this rank's place along each axis, and the group to talk to there.

A `Seat` gives a trainer its mesh. The default one reads the launcher's environment, forms the
group once and halts when it breaks; the supervisor's (`elastic/seat.py`) forms a new one under
the next generation. Forming has a deadline of its own, because left alone it can wait half an
hour for a rank that never came.
"""

import os
from datetime import timedelta
from typing import NamedTuple, Protocol

from shoal.comm.collectives import Group
from shoal.comm.store import client, come_together, form_group, leave_group
from shoal.errors import GroupLost, UsageError
from shoal.hooks import StepInfo
from shoal.world import World

FORM_TIMEOUT_S = 30.0


class Mesh(NamedTuple):
    """Ranks that run one step together. Built anew for every generation."""

    data: Group
    device: str
    generation: int = 0

    @property
    def rank(self) -> int:
        return self.data.rank

    @property
    def num_ranks(self) -> int:
        return self.data.num_ranks


class Seat(Protocol):
    """A rank's place in the mesh. Called by the trainer, from its thread only.

    `form` first; `reform` after each `GroupLost`; `finish` when the last step is committed.
    """

    recovers: bool  # whether a new generation can come after a loss

    def form(self) -> Mesh: ...
    def reform(self, lost: GroupLost) -> Mesh:
        """The mesh of the next generation; raises `lost` if none comes."""
        ...

    def formed(self, step: int) -> None:
        """Say that the new group agrees on the state after `step`."""
        ...

    def stepped(self, info: StepInfo) -> None: ...
    def stop_requested(self) -> bool: ...
    def finish(self) -> bool:
        """Wait until all ranks are done: True; False if another generation must be served first."""
        ...

    def close(self) -> None: ...


class LauncherSeat:
    """The seat a launcher gave (torchrun, srun, mpirun), or a world of one. Not to be refilled."""

    recovers = False

    def __init__(self, world: World):
        self.world = world
        self._form_timeout_s = float(os.environ.get("SHOAL_FORM_TIMEOUT_S", FORM_TIMEOUT_S))
        self._owns_group = False

    def form(self) -> Mesh:
        world = self.world
        if world.num_ranks == 1:
            return Mesh(Group(), world.device)
        import torch.distributed as dist

        if not dist.is_initialized():
            host, port = _master()
            listens = world.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
            store = client(host, port, self._form_timeout_s, listens=listens)
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            come_together(store, f"shoal/{restart}", world, self._form_timeout_s)
            form_group(store, f"shoal/{restart}", world, timedelta(seconds=self._form_timeout_s))
            self._owns_group = True
        return Mesh(Group(dist.group.WORLD), world.device)

    def reform(self, lost: GroupLost) -> Mesh:
        raise lost

    def formed(self, step: int) -> None:
        """Nobody keeps account."""

    def stepped(self, info: StepInfo) -> None:
        """Nobody watches."""

    def stop_requested(self) -> bool:
        return False

    def finish(self) -> bool:
        return True

    def close(self) -> None:
        if self._owns_group:
            leave_group()


def _master() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError(
            "The launcher started several ranks but MASTER_ADDR and MASTER_PORT do not say where "
            "they meet. Set them to the first host's address and a free port, or use torchrun."
        ) from None
