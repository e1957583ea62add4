"""Who I am among the processes of a job, read from the environment any launcher sets.

torchrun, Slurm's srun and Open MPI's mpirun each use names of their own; Shoal's supervisor uses
torchrun's. Without any of them a process is a world of one.
"""

import os
from typing import Mapping, NamedTuple

from shoal.errors import UsageError

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}


class World(NamedTuple):
    """This process's place. `launcher` is empty without a launcher."""

    rank: int = 0
    num_ranks: int = 1
    rank_of_node: int = 0
    num_ranks_of_node: int = 1
    launcher: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
            if rank in environment and size in environment:
                return cls(
                    rank=_number(environment, rank),
                    num_ranks=_number(environment, size),
                    rank_of_node=_number(environment, local_rank, default=0),
                    num_ranks_of_node=_number(environment, local_size, default=1),
                    launcher=launcher,
                )
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


def cores() -> int:
    """The cores this process may use, which a container or taskset may have narrowed."""
    return len(os.sched_getaffinity(0))


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        # Slurm writes "2(x3)" for the tasks of three alike nodes.
        return int((text or "").split("(")[0])
    except ValueError:
        raise UsageError(
            f"{name}={text!r} in the environment is not a number. The launcher sets it; "
            "start the script with torchrun, srun or mpirun, or unset it."
        ) from None
