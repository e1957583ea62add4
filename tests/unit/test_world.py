"""Who a process is, from any launcher's environment, and the default seat."""

import pytest

from shoal.comm.mesh import Axes, LauncherSeat
from shoal.errors import GroupLost, UsageError
from shoal.world import World, cores


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World()),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            World(3, 4, 1, 2, "torchrun"),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "6",
                "SLURM_LOCALID": "1",
                "SLURM_NTASKS_PER_NODE": "2(x3)",
            },
            World(5, 6, 1, 2, "srun"),
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
