"""Who I am among the processes of a job, read from the environment any launcher sets.

Each launcher uses names of its own (`_LAUNCHERS`); Shoal's supervisor uses torchrun's. Without any
of them a process is a world of one. What is more special comes first: mpirun inside a Slurm job
starts its processes through srun, whose variables then count the daemons of mpirun.

Read next: `comm/launcher_store.py`, for where such processes meet.
"""

import os
import re
from typing import Mapping, NamedTuple

from shoal.errors import UsageError

# By launcher: the variables of rank, number of ranks, and both among the ranks of the same host.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI; HPE's PALS. srun sets PMI_RANK too, without what follows it.
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PALS": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    # Of a step, not of the job: a batch script has SLURM_PROCID=0 and SLURM_NTASKS as well.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_NEEDS_ALL = ("mpiexec", "PALS")  # variables, to tell them apart


class World(NamedTuple):
    """This process's place. `launcher` is empty without a launcher."""

    rank: int = 0
    num_ranks: int = 1
    rank_of_node: int = 0
    num_ranks_of_node: int = 1
    launcher: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        for launcher, names in _LAUNCHERS.items():
            needed = names if launcher in _NEEDS_ALL else names[:2]
            if all(name in environment for name in needed):
                rank, size, local_rank, local_size = names
                found = cls(
                    rank=_number(environment, rank),
                    num_ranks=_number(environment, size),
                    rank_of_node=_number(environment, local_rank, default=0),
                    num_ranks_of_node=_number_of_node(environment, local_size),
                    launcher=launcher,
                )
                # A spare of Shoal's supervisor has a number above those of the seats.
                if found.rank < 0 or not (found.rank < found.num_ranks or is_supervised()):
                    raise UsageError(
                        f"{rank}={found.rank} and {size}={found.num_ranks} in the environment do "
                        f"not fit together: ranks count from 0. {_WAY_OUT}"
                    )
                return found
        return cls()

    @property
    def device(self) -> str:
        """The device this rank computes on: its own GPU where there is one, else the CPU."""
        import torch

        if torch.cuda.is_available():
            return f"cuda:{self.rank_of_node % torch.cuda.device_count()}"
        return "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.device.startswith("cuda") else "gloo"


CORES = "SHOAL_CORES"  # how many cores the hosts of a run have, where it has several


def cores_of_run(environment: Mapping[str, str] = os.environ) -> int:
    """The cores of all hosts of a run, by which `data=auto` is chosen."""
    return _number(environment, CORES, default=cores()) or cores()


def launched_world() -> World | None:
    """This process's place among several that a launcher other than Shoal started, or None."""
    world = World() if is_supervised() else World.from_environment()
    return world if world.num_ranks > 1 else None


def is_supervised() -> bool:
    """Whether Shoal's supervisor started this process, or a process that it comes from."""
    return "SHOAL_CONTROL" in os.environ


def cores() -> int:
    """The cores this process may use, which a container or taskset may have narrowed."""
    return len(os.sched_getaffinity(0))


_WAY_OUT = "The launcher sets them; start with torchrun, srun or mpirun, or unset them."


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"{name}={text!r} in the environment is not a number. {_WAY_OUT}"
        ) from None


def _number_of_node(environment: Mapping[str, str], name: str) -> int:
    """Slurm counts all nodes, as in "4,2(x3)"; SLURM_NODEID is the place of this one."""
    text = environment.get(name, "")
    if name != "SLURM_STEP_TASKS_PER_NODE" or not text:
        return _number(environment, name, default=1)
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            raise UsageError(f"{name}={text!r} in the environment is no list of counts. {_WAY_OUT}")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(environment, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else 1
