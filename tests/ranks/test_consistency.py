"""What a loop of one's own may write between two steps, and what it may not."""

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.manifest import Origin
from shoal.comm.mesh import Axes, Mesh
from shoal.events.events import ConsistencyEvent, Event, kind_of
from shoal.storage.store import DirectoryStore
from shoal.sync.consistency import data_lines
from shoal.sync.guard import CorruptState
from shoal.testing.ranks import Pool
from shoal.training.checkpointing import Checkpointer, CheckpointSettings
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from tests.parity.runs import GivenSeat, network


def write(trainer: Trainer, how: str, step: int) -> None:
    """What the body of a loop does after a step."""
    first = next(trainer.model.parameters())
    moments = [own["exp_avg"] for own in trainer.optimizer.state.values()]
    is_odd = trainer.mesh.rank == 1 and step == 5
    with torch.no_grad():
        if how == "clamp":
            for p in trainer.model.parameters():
                p.data.clamp_(-0.1, 0.1)
        elif how == "decay":
            first.mul_(0.99)
        elif how == "reset" and step % 3 == 0:
            for moment in moments:
                moment.zero_()
        elif how == "replace" and step % 3 == 0:
            for own in trainer.optimizer.state.values():
                own["exp_avg"] = torch.zeros_like(own["exp_avg"])
        elif how == "buffers":
            for buffer in trainer.model.buffers():
                buffer.add_(trainer.mesh.rank + 1)  # which the next piece takes back
        elif how == "one rank's weights" and is_odd:
            first.mul_(2)
        elif how == "one rank's moments" and is_odd:
            moments[0].numpy()[:] += 1  # torch does not see it


def train(mesh: Mesh, plan: str, how: str, folder: str) -> str:
    """Train in such a loop, with checkpoints; what was told of corruption, or the error."""
    run = network(save_every=2)
    resolved = resolve(run, plan, mesh.num_ranks)
    seat, told = GivenSeat(mesh), list[str]()

    def emit(event: Event) -> None:
        if isinstance(event, ConsistencyEvent):
            told.append(kind_of(event))

    seat.emit = emit  # type: ignore[method-assign]
    origin = Origin("r.py:f", {}, str(resolved), 1, len(run.data), {})
    checkpointer = Checkpointer(
        CheckpointSettings(DirectoryStore(Path(folder)), origin, others_may_write=True), emit
    )
    try:
        with Trainer(run, resolved, seat, checkpointer=checkpointer) as trainer:
            for info in trainer:
                write(trainer, how, info.step)
    except CorruptState as error:
        return str(error)
    return " ".join(told)


PLANS = [
    "data=2 memory=apart",
    "data=2 zero=1 memory=apart",
    "data=2 zero=3",
    "data=2 local_steps=2",
    "data=2 local_steps=4 outer=nesterov",
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "how",
    [
        "clamp",
        *(
            pytest.param(how, marks=pytest.mark.full)
            for how in ("decay", "reset", "replace", "buffers")
        ),
    ],
)
def test_what_all_ranks_write_alike_is_theirs(pool: Pool, tmp_path, plan: str, how: str) -> None:
    assert pool.run(train, 2, plan, how, str(tmp_path)) == ["", ""]


@pytest.mark.parametrize("plan", ["data=2 memory=apart", "data=2 zero=2 memory=apart"])
def test_what_one_of_two_ranks_writes_alone_ends_the_run(pool: Pool, tmp_path, plan: str) -> None:
    told = pool.run(train, 2, plan, "one rank's weights", str(tmp_path))
    for words in told:
        assert "0.weight became unlike on ranks 0 and 1 between steps 4 and 5" in words


def test_of_three_ranks_the_one_that_writes_alone_is_repaired(pool: Pool, tmp_path) -> None:
    told = pool.run(train, 3, "data=3 memory=apart", "one rank's moments", str(tmp_path))
    assert told == ["replica-repaired", "", ""]


def lines(mesh: Mesh, tensor: int, pipeline: int) -> tuple[list[list[int]], list[int]]:
    """As they are counted, and as the group of this rank's line has them."""
    formed = Mesh.form(mesh.world, Axes(tensor, pipeline), "cpu")
    told = [int(row[0]) for row in formed.data.all_gather_numbers([formed.rank])]
    formed.world.all_gather_numbers([0])  # nobody leaves while others still form
    return data_lines(formed), told


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
def test_lines_of_replicas_are_those_of_the_mesh(pool: Pool, tensor: int, pipeline: int) -> None:
    for rank, (counted, told) in enumerate(pool.run(lines, 4, tensor, pipeline)):
        assert next(line for line in counted if rank in line) == told


def replica_groups(mesh: Mesh, axes: Axes) -> dict[str, list[int]]:
    """The ranks of the groups of this rank's replica, as they tell each other."""
    formed = Mesh.form(mesh.world, Axes(*axes), "cpu")
    groups = {"peers": formed.peers, "replica": formed.own.world, "data": formed.own.data}
    told = {name: group.all_gather_numbers([formed.rank]) for name, group in groups.items()}
    formed.world.all_gather_numbers([0])
    assert next(line for line in data_lines(formed, of_peers=True) if formed.rank in line) == [
        int(row[0]) for row in told["peers"]
    ]
    return {name: [int(row[0]) for row in rows] for name, rows in told.items()}


@pytest.mark.parametrize(
    ("axes", "of_rank_1"),
    [
        (Axes(within=1), {"peers": [0, 1, 2, 3], "replica": [1], "data": [1]}),
        (Axes(within=2), {"peers": [1, 3], "replica": [0, 1], "data": [0, 1]}),
        (Axes(tensor=2, within=1), {"peers": [1, 3], "replica": [0, 1], "data": [1]}),
        (Axes(pipeline=2, within=1), {"peers": [0, 1], "replica": [1, 3], "data": [1]}),
    ],
)
def test_a_replica_has_its_own_ranks_and_peers_in_the_others(
    pool: Pool, axes: Axes, of_rank_1: dict[str, list[int]]
) -> None:
    assert pool.run(replica_groups, 4, axes)[1] == of_rank_1
