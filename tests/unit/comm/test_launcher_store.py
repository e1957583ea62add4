"""Where ranks of a launcher meet: by variables, at a socket of one host, at srun's first host."""

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.launcher_store import MeetingPlace, launcher_store, meeting_place
from shoal.errors import FormError, UsageError
from shoal.world import World

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
THERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("world", "environment", "place"),
    [
        (World(0, 2, 0, 2, "torchrun"), THERE, MeetingPlace("10.0.0.1", 1234, "", True)),
        (World(0, 2, 0, 1, "torchrun"), THERE, MeetingPlace("10.0.0.1", 1234, "", False)),
        (World(0, 2, 0, 1, "srun"), HERE, MeetingPlace("127.0.0.1", 1234, "", True)),
        (
            World(0, 2, 0, 2, "mpirun"),
            {"PMIX_NAMESPACE": "55"},
            MeetingPlace(job="mpirun PMIX_NAMESPACE=55"),
        ),
        (World(0, 2, 0, 2, "mpiexec"), {}, MeetingPlace(job="mpiexec process 1")),
        (
            World(0, 2, 0, 2, "srun"),
            JOB,
            MeetingPlace(job="srun SLURM_JOB_ID=7 SLURM_STEP_ID=0"),
        ),
    ],
)
def test_the_place_follows_from_the_environment(
    world: World, environment: dict[str, str], place: MeetingPlace
) -> None:
    assert meeting_place(world, environment, ancestor=lambda: "process 1") == place


@given(job=st.integers(0, 10**9), step=st.integers(0, 1000), rank=st.integers(0, 7))
def test_ranks_of_srun_on_several_hosts_agree_on_a_port(job: int, step: int, rank: int) -> None:
    variables = {**JOB, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
    of = [
        meeting_place(World(r, 8, r % 4, 4, "srun"), variables, lambda nodes: nodes[:1])
        for r in (0, rank)
    ]
    assert of[0] == of[1] and of[0].host == "n" and 1024 < of[0].port < 32768
    assert not of[0].is_one_host


def test_what_is_not_said_is_asked_for() -> None:
    with pytest.raises(UsageError, match="mpirun -x MASTER_ADDR"):
        meeting_place(World(0, 2, 0, 1, "mpirun"), {"PMIX_NAMESPACE": "55"})
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        meeting_place(World(0, 2, 0, 1, "torchrun"), {})
    with pytest.raises(UsageError, match="MASTER_PORT='70000'"):
        meeting_place(World(0, 2, 0, 2, "mpirun"), {**HERE, "MASTER_PORT": "70000"})
    with pytest.raises(UsageError, match="scontrol does not say"):
        meeting_place(World(0, 2, 0, 1, "srun"), {**JOB, "SLURM_STEP_NODELIST": "no,such[list"})


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is taken back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return tmp_path


def test_ranks_of_one_host_meet_at_a_socket_of_this_users_own(directory: Path) -> None:
    place, got = MeetingPlace(job="a job"), []

    def come() -> None:
        with launcher_store(World(1, 2, 1, 2, "mpirun"), place, 10.0) as store:
            got.append(store.get("key"))

    other = threading.Thread(target=come)
    other.start()
    with launcher_store(World(0, 2, 0, 2, "mpirun"), place, 10.0) as store:
        (found,) = directory.iterdir()
        assert found.stat().st_mode & 0o077 == 0
        store.set("key", "value")
        other.join()
        with (
            pytest.raises(UsageError, match=f"Process {os.getpid()} is rank 0 of this job already"),
            launcher_store(World(0, 2, 0, 2, "mpirun"), place, 10.0),
        ):
            pass
    assert got == [b"value"] and not list(directory.iterdir())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_what_a_killed_job_left_is_passed_over_and_removed(directory: Path) -> None:
    place = MeetingPlace(job="a job")
    with launcher_store(World(0, 2, 0, 2, "mpirun"), place, 10.0):
        (found,) = directory.iterdir()
    for name in (found.name, found.name[:-1] + "x"):
        (directory / name).mkdir(mode=0o700)
        left = {"pid": 1, "started_at": 1.0, "address": "ipc:///nowhere"}
        (directory / name / "store").write_text(json.dumps(left))
    with (
        pytest.raises(FormError, match="Rank 0 did not come"),
        launcher_store(World(1, 2, 1, 2, "mpirun"), place, 0.1),
    ):
        pass
    with launcher_store(World(0, 2, 0, 2, "mpirun"), place, 10.0) as store:
        store.set("key", "value")
        assert [each.name for each in directory.iterdir()] == [found.name]
    assert not list(directory.iterdir())


def test_a_directory_that_others_may_enter_is_refused(directory: Path) -> None:
    place = MeetingPlace(job="a job")
    with launcher_store(World(0, 2, 0, 2, "mpirun"), place, 10.0):
        (found,) = directory.iterdir()
    found.mkdir()
    found.chmod(0o777)
    with (
        pytest.raises(UsageError, match="this user alone may enter"),
        launcher_store(World(0, 2, 0, 2, "mpirun"), place, 10.0),
    ):
        pass
    assert found.exists()
