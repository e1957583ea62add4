"""Who a process is, from any launcher's environment, and the default seat."""

import pytest

from shoal.comm.mesh import Axes, LauncherSeat
from shoal.errors import GroupLost, UsageError
from shoal.world import World, cores, launched_world

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World()),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            World(3, 4, 1, 2, "torchrun"),
        ),
        ({**SRUN, "SLURM_NODEID": "2"}, World(5, 7, 1, 2, "srun")),
        ({**SRUN, "SLURM_NODEID": "0"}, World(5, 7, 1, 3, "srun")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, World()),  # a batch script
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            World(1, 4, 1, 2, "mpiexec"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"},
            World(1, 4, 0, 1, "PALS"),
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "7", **SRUN}, World(5, 7, 1, 3, "srun")),  # --mpi=pmi2
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **SRUN},
            World(1, 2, 0, 1, "mpirun"),  # whose daemons srun has started
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            World(0, 2, 0, 1, "mpirun"),
        ),
        ({"RANK": "1"}, World()),
    ],
)
def test_the_environment_of_each_launcher(environment: dict[str, str], world: World) -> None:
    assert World.from_environment(environment) == world


def test_what_is_not_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="RANK='one'"):
        World.from_environment({"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="no list of counts"):
        World.from_environment({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"})
    for rank in ("2", "-1"):
        with pytest.raises(UsageError, match=f"RANK={rank} and WORLD_SIZE=2"):
            World.from_environment({"RANK": rank, "WORLD_SIZE": "2"})


def test_only_another_launcher_makes_a_process_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("SHOAL_CONTROL", raising=False)
    assert launched_world() == World(1, 2, 0, 1, "torchrun")
    monkeypatch.setenv("SHOAL_CONTROL", "ipc:///of/a/supervisor")
    assert launched_world() is None
    monkeypatch.delenv("SHOAL_CONTROL")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched_world() is None


def test_cores_are_at_least_one() -> None:
    assert cores() >= 1


def test_a_world_of_one_needs_no_group() -> None:
    seat = LauncherSeat(World())
    mesh = seat.form(Axes())
    assert (mesh.rank, mesh.num_ranks) == (0, 1)
    assert seat.finish() and not any(seat.asked())
    with pytest.raises(GroupLost):
        seat.reform(GroupLost("gone"))
    seat.close()


def test_several_ranks_must_know_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        LauncherSeat(World(0, 2, 0, 2, "torchrun")).form(Axes())
