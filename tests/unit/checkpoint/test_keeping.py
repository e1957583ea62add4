"""What a save must not do to training, and what it must keep of it, whatever the store does."""

import errno
import shutil
import threading
import time
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checkpoint import save
from shoal.checkpoint.dtypes import first_unsupported
from shoal.checkpoint.find import checkpoint_name
from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import Origin, Progress
from shoal.checkpoint.retention import RetentionPolicy
from shoal.checkpoint.save import Saver, SaveResult
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.verify import inspect_checkpoints
from shoal.comm.collectives import Group
from shoal.comm.mesh import LauncherSeat, Mesh
from shoal.errors import UsageError
from shoal.events.events import Event, kind_of
from shoal.parallel.layout import whole_slice
from shoal.storage.object_client import StoreError
from shoal.storage.store import DirectoryDraft, DirectoryStore
from shoal.testing.ranks import Pool
from shoal.training.checkpointing import Checkpointer, CheckpointSettings, NotSaved
from shoal.training.resume import newest, refuse_used_store
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World
from tests.parity.runs import GivenSeat
from tests.unit.checkpoint.made import make, tensors

NAME = "step-00000010"
ABOUT = (Progress(10, 0, 0, 0), Origin("r.py:f", {}, "data=1", 1, 120, {}))


class Slow(DirectoryStore):
    """A store far away: it begins when it is told to."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.may_begin = threading.Event()

    def create_draft(self, name: str, token: str) -> DirectoryDraft:
        assert self.may_begin.wait(20)
        return super().create_draft(name, token)


class Full(DirectoryStore):
    def create_draft(self, name: str, token: str) -> DirectoryDraft:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_no_step_waits_for_a_store_to_begin(tmp_path: Path) -> None:
    """Neither the save's own call nor the update after it."""
    store, ended = Slow(tmp_path), list[SaveResult]()
    saver, tensor = Saver(store, ended.append), torch.ones(1000)
    assert saver.save(Group(), NAME, {"model.a": [whole_slice(tensor)]}, {}, ABOUT) == ""
    saver.await_copy()
    tensor.zero_()  # the update
    assert not ended and saver.is_busy
    store.may_begin.set()
    saver.finish(Group())
    assert [saved.problem for saved in ended] == [""]
    assert torch.equal(CheckpointReader(store, NAME).whole("model.a"), torch.ones(1000))


def test_what_was_changed_before_anybody_copied_it_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ended = Slow(tmp_path), list[SaveResult]()
    monkeypatch.setattr(Snapshot, "copy", lambda self: store.may_begin.wait(10))
    saver, tensor = Saver(store, ended.append), torch.ones(1000)
    saver.save(Group(), NAME, {"model.a": [whole_slice(tensor)]}, {}, ABOUT)
    tensor.zero_()  # by no update
    saver.await_copy()  # which is not the place to fail
    store.may_begin.set()
    saver.finish(Group())
    assert "model.a was changed while it was being saved" in ended[0].problem
    assert store.names() == []


def save_in(mesh: Mesh, path: str, delay_s: float) -> list[str]:
    """On a rank: save in a store in which rank 0 begins late, or cannot."""
    own = Slow(Path(path)) if delay_s else Full(Path(path))
    ended: list[SaveResult] = []
    saver = Saver(own, ended.append)
    tensors = {"model.a": [whole_slice(torch.arange(5.0))]}
    problems = [saver.save(mesh.world, NAME, tensors, {}, ABOUT)]
    if isinstance(own, Slow):
        time.sleep(delay_s)
        own.may_begin.set()
    saver.finish(mesh.world)
    saver.await_copy()
    return problems + [saved.problem for saved in ended]


def test_ranks_wait_for_the_first_to_begin(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save_in, 2, str(tmp_path), 0.1) == [["", ""], ["", ""]]
    CheckpointReader(DirectoryStore(tmp_path), NAME).verify()


def test_ranks_do_not_wait_for_what_cannot_begin(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(save_in, 2, str(tmp_path), 0.0)
    assert first == ["", f"rank 0 on {gethostname()}: {tmp_path}: No space left on device"]
    assert second == ["", "rank 0 has given it up"]


def save_changed_in(mesh: Mesh, path: str) -> list[str]:
    """On a rank: save in a store in which rank 0 begins when the other has found a change."""
    store, ended, tensor = Slow(Path(path)), list[SaveResult](), torch.arange(5.0)
    name, copy = f"model.{mesh.rank}", Snapshot.copy

    def copy_changed(snapshot: Snapshot) -> None:
        if mesh.rank:
            tensor.zero_()
        copy(snapshot)

    with patch.object(Snapshot, "copy", copy_changed):
        saver = Saver(store, ended.append)
        saver.save(mesh.world, NAME, {name: [whole_slice(tensor)]}, {}, ABOUT)
        mesh.world.all_gather_numbers([1.0])
        time.sleep(0.1)
        store.may_begin.set()
        saver.finish(mesh.world)
    return [saved.problem for saved in ended]


def test_ranks_do_not_wait_for_one_whose_state_was_changed(pool: Pool, tmp_path: Path) -> None:
    """It discards the draft, although rank 0 makes it later."""
    first, second = pool.run(save_changed_in, 2, str(tmp_path))
    assert len(first) == 1 and first[0]
    assert "was changed while it was being saved" in second[0]
    assert DirectoryStore(tmp_path).names() == []


class Frozen(nn.Module):
    """Its forward moves a weight that no update does, behind torch's back."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(400_000), requires_grad=False)
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.teacher.data.add_(1.0)
        return self.layer(inputs)


def run_of(model: Any, **changes: Any) -> Run:
    inputs = torch.linspace(-1, 1, 24).view(8, 3)
    settings = {
        "batch_size": 4,
        "steps": 6,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
    } | changes
    return shoal.Run(
        model=model,
        loss=lambda output, target: (output.abs() - target).square().mean(),
        data=shoal.data.tensors(inputs, torch.zeros(8, 1)),
        **settings,
    )


def trainer_of(
    run: Run,
    store: DirectoryStore,
    mesh: Mesh | None = None,
    plan: str = "data=1",
    tell: Any = lambda event, **what: None,
    **keeping: Any,
) -> Trainer:
    resolved = resolve(run, plan, 1 if mesh is None else mesh.num_ranks)
    origin = Origin("r.py:f", {}, str(resolved), 1, len(run.data), {})
    checkpointer = Checkpointer(CheckpointSettings(store, origin, **keeping), tell)
    seat = LauncherSeat(World()) if mesh is None else GivenSeat(mesh)
    return Trainer(run, resolved, seat, checkpointer=checkpointer)


def test_frozen_weights_that_a_forward_changes_are_copied_at_once(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    with trainer_of(run_of(Frozen, save_every=2, steps=3), store) as trainer:
        steps = iter(trainer)
        next(steps), next(steps)
        before = trainer.model.teacher.detach().clone()
        trainer.model.teacher.data.add_(1.0)  # as the next forward will
        store.may_begin.set()
        for _ in steps:
            pass
    saved = CheckpointReader(store, "step-00000002").whole("model.teacher")
    assert torch.equal(saved, before)
    assert CheckpointReader(store, "step-00000003").whole("model.teacher")[0] > before[0]


class Spectrum(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        if kind == "parameter":
            self.table = nn.Parameter(torch.ones(2, dtype=torch.complex128), requires_grad=False)
        else:
            self.register_buffer("table", torch.ones(2, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_model_that_no_checkpoint_can_hold(tmp_path: Path, kind: str) -> None:
    """Refused before the first step if checkpoints are asked for, and trained without otherwise."""
    told, run = "table is complex128", run_of(lambda: Spectrum(kind))
    store = DirectoryStore(tmp_path)
    model = run.make_model()
    assert first_unsupported([*model.named_parameters(), *model.named_buffers()]) == told
    with pytest.raises(UsageError, match=told), trainer_of(run, store):
        pytest.fail("it began")
    if kind == "buffer":
        with trainer_of(run, store, is_asked=False) as trainer:
            assert [info.step for info in trainer] == list(range(1, 7))
    assert store.names() == []


def test_a_script_does_not_end_as_if_its_end_were_saved(tmp_path: Path) -> None:
    run = run_of(lambda: nn.Linear(3, 1))
    with (
        pytest.raises(
            NotSaved, match=r"Step 6, the last, could not be saved: .*: No space"
        ) as told,
        trainer_of(run, Full(tmp_path), others_may_write=True) as trainer,
    ):
        assert len(list(trainer)) == 6
    place = Path(str(told.value).partition("It is in ")[2].partition(" instead")[0])
    with trainer_of(run, DirectoryStore(place.parent)) as trainer:
        assert trainer.step == 6, "what was rescued can be gone on from"
    shutil.rmtree(place.parent)


class Odd(torch.optim.SGD):
    """Keeps for its first parameter what no checkpoint can hold."""

    def __init__(self, named: Any, kind: str):
        super().__init__(named, lr=0.1)
        self.kind = kind

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"][:1]:
            odd = torch.zeros(2, dtype=torch.complex128) if self.kind == "complex128" else None
            odd = p.detach().to_sparse() if self.kind == "sparse" else odd
            self.state[p]["odd"] = {1} if odd is None else odd


def train_oddly(mesh: Mesh | None, path: str, kind: str, plan: str, asked: bool) -> list[str]:
    """Steps that were made, what was told, and how it ended."""
    run = run_of(lambda: nn.Linear(3, 1), optimizer=lambda named: Odd(named, kind))
    told: list[str] = []

    def tell(event: Event) -> None:
        told.append(f"{kind_of(event)}: {getattr(event, 'why', None)}")

    try:
        with trainer_of(
            run, DirectoryStore(Path(path)), mesh, plan, tell, is_asked=asked
        ) as trainer:
            told += [f"step {info.step}" for info in trainer]
    except UsageError as error:
        told.append(f"after {trainer.step}: {error}")
    return told


@pytest.mark.parametrize("kind", ["complex128", "sparse", "set"])
@pytest.mark.parametrize("plan", ["data=1", "data=2 zero=1"])
def test_an_optimizer_that_no_checkpoint_can_hold(
    pool: Pool, tmp_path: Path, plan: str, kind: str
) -> None:
    """It shows in its first step: then it is refused on every rank, or trained without."""
    num_ranks = 1 if plan == "data=1" else 2
    for told in pool.run(train_oddly, num_ranks, str(tmp_path), kind, plan, True):
        assert len(told) == 1 and told[0].startswith("after 1: This run cannot be saved: "), told
        assert ".odd" in told[0] and f"are to be kept in {tmp_path}" in told[0]
    first, *others = pool.run(train_oddly, num_ranks, str(tmp_path), kind, plan, False)
    steps = [f"step {number}" for number in range(1, 7)]
    assert first[0].startswith("unholdable: ") and ".odd" in first[0]
    assert first[1:] == steps and all(other == steps for other in others)
    assert DirectoryStore(tmp_path).names() == []


def save_apart(mesh: Mesh, path: str) -> bool:
    """Save between two averages, in a store that begins when buffers have moved on."""
    store = Slow(Path(path))
    run = run_of(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), save_every=2, steps=4)
    with trainer_of(run, store, mesh, "data=2 local_steps=3") as trainer:
        steps = iter(trainer)
        next(steps), next(steps)
        before = trainer.model[0].running_mean.clone()
        trainer.model[0](torch.randn(4, 3))  # as the next forward will
        store.may_begin.set()
        for _ in steps:
            pass
    saved = CheckpointReader(store, "step-00000002").whole(
        f"replica.{mesh.rank}.model.0.running_mean"
    )
    return torch.equal(saved, before)


def test_buffers_of_replicas_that_are_apart_are_copied_at_once(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save_apart, 2, str(tmp_path)) == [True, True]


def test_a_copy_of_another_name_is_neither_gone_on_from_nor_removed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    run = run_of(lambda: nn.Linear(3, 1), save_every=1, steps=3)
    make(tmp_path, tensors(), name="z-copy", step=900)
    (tmp_path / "notes").mkdir()
    refuse_used_store(store)  # there is none of a run
    with trainer_of(run, store) as trainer:
        for _ in trainer:
            trainer.checkpointer.finish(trainer)
    assert store.names() == ["notes", "step-00000002", "step-00000003", "z-copy"]
    assert newest(store).progress.step == 3
    with pytest.raises(UsageError, match="already holds checkpoints"):
        refuse_used_store(store)
    longer = run_of(lambda: nn.Linear(3, 1), save_every=1, steps=4)
    with trainer_of(longer, store) as trainer:
        assert [info.step for info in trainer] == [4]


def test_a_save_looks_at_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def look(store: DirectoryStore, names: list[str]) -> Any:
        opened.extend(names)
        return inspect_checkpoints(store, names)

    monkeypatch.setattr("shoal.training.checkpointing.inspect_checkpoints", look)
    run = run_of(lambda: nn.Linear(3, 1), save_every=2)
    with trainer_of(run, DirectoryStore(tmp_path), keep=RetentionPolicy(last=9)) as trainer:
        for _ in trainer:
            trainer.checkpointer.finish(trainer)
    assert opened == [checkpoint_name(2), checkpoint_name(4), checkpoint_name(6)]


class Unreachable(DirectoryStore):
    """A store behind a network that goes down."""

    def open(self, name: str, file: str) -> Any:
        raise StoreError(errno.EIO, "cannot look at it: no route. It was tried 6 times.")


def test_a_store_that_cannot_be_reached_is_no_bad_checkpoint(tmp_path: Path) -> None:
    """Going on from an older one, or from nothing, would throw steps away."""
    run = run_of(lambda: nn.Linear(3, 1), save_every=2)
    with trainer_of(run, DirectoryStore(tmp_path)) as trainer:
        list(trainer)
    with pytest.raises(StoreError, match="no route"):
        newest(Unreachable(tmp_path))
    with pytest.raises(StoreError, match="no route"), trainer_of(run, Unreachable(tmp_path)):
        pytest.fail("it began")


def test_a_store_that_goes_down_while_it_is_read_is_no_bad_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(lambda: nn.Linear(3, 1), save_every=2)
    with trainer_of(run, DirectoryStore(tmp_path)) as trainer:
        list(trainer)

    def fill(*_: Any) -> None:
        raise StoreError(errno.EIO, "no route")

    monkeypatch.setattr(CheckpointReader, "fill", fill)
    with pytest.raises(StoreError, match="no route"), trainer_of(run, DirectoryStore(tmp_path)):
        pytest.fail("it began")


def test_a_spare_that_comes_later_finds_the_checkpoints_of_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is above those of the seats; a rank of a new run is to say resume."""
    run = run_of(lambda: nn.Linear(3, 1), save_every=2, steps=3)
    with trainer_of(run, DirectoryStore(tmp_path)) as trainer:
        list(trainer)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="already holds checkpoints"):
        shoal.trainer(run, checkpoints=tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("shoal.world.is_supervised", lambda: True)
    shoal.trainer(run, checkpoints=tmp_path).seat.close()


def test_a_draft_that_begins_between_two_looks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may begin, and say so, right after another rank looked in vain."""
    store = DirectoryStore(tmp_path)
    saver, draft = Saver(store, lambda saved: None), store.join_draft("step-1", "token")
    saver._begun.clear()
    look, num_looks = save._is_there, 0

    def look_too_early(draft: Any) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks > 1:
            return look(draft)
        store.create_draft("step-1", "token")
        saver._begun.set()
        return False

    monkeypatch.setattr(save, "_is_there", look_too_early)
    work: Any = SimpleNamespace(rank=1)
    saver._begin(work, draft)
    assert num_looks == 2
