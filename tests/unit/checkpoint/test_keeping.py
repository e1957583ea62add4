"""What a save must not do to training, and what it must keep of it, whatever the store does."""

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checkpoint.load import Opened
from shoal.checkpoint.manifest import Origin, Progress
from shoal.checkpoint.save import Saved, Saver
from shoal.checkpoint.storage import Directory, DirectoryDraft
from shoal.checkpoint.types import unholdable
from shoal.comm.collectives import Group
from shoal.errors import UsageError
from shoal.keeping import Keeper, Keeping, NotSaved
from shoal.mesh import LauncherSeat, Mesh
from shoal.parallel.layout import whole
from shoal.run import Run, resolve
from shoal.testing.ranks import Pool
from shoal.training import Trainer
from shoal.world import World

NAME = "step-00000010"
ABOUT = (Progress(10, 0, 0, 0), Origin("r.py:f", {}, "data=1", 1, 120, {}))


class Slow(Directory):
    """A store far away: it begins when it is told to."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.may_begin = threading.Event()

    def begin(self, name: str, token: str) -> DirectoryDraft:
        assert self.may_begin.wait(20)
        return super().begin(name, token)


class Full(Directory):
    def begin(self, name: str, token: str) -> DirectoryDraft:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_no_step_waits_for_a_store_to_begin(tmp_path: Path) -> None:
    """Neither the save's own call nor the update after it."""
    store, ended = Slow(tmp_path), list[Saved]()
    saver, tensor = Saver(store, ended.append), torch.ones(1000)
    assert saver.save(Group(), NAME, {"model.a": [whole(tensor)]}, {}, ABOUT) == ""
    saver.await_copy()
    tensor.zero_()  # the update
    assert not ended and saver.is_busy
    store.may_begin.set()
    saver.finish(Group())
    assert [saved.problem for saved in ended] == [""]
    assert torch.equal(Opened(store, NAME).whole("model.a"), torch.ones(1000))


def test_what_was_changed_before_anybody_read_it_is_not_saved(tmp_path: Path) -> None:
    store, ended = Slow(tmp_path), list[Saved]()
    saver, tensor = Saver(store, ended.append), torch.ones(1000)
    saver.save(Group(), NAME, {"model.a": [whole(tensor)]}, {}, ABOUT)
    tensor.zero_()  # by no update
    saver.await_copy()  # which is not the place to fail
    store.may_begin.set()
    saver.finish(Group())
    assert "model.a was changed while it was being saved" in ended[0].problem
    assert store.names() == []


def save_in(mesh: Mesh, path: str, delay_s: float) -> list[str]:
    """On a rank: save in a store in which rank 0 begins late, or cannot."""
    own = Slow(Path(path)) if delay_s else Full(Path(path))
    ended: list[Saved] = []
    saver = Saver(own, ended.append)
    tensors = {"model.a": [whole(torch.arange(5.0))]}
    problems = [saver.save(mesh.world, NAME, tensors, {}, ABOUT)]
    if isinstance(own, Slow):
        time.sleep(delay_s)
        own.may_begin.set()
    saver.finish(mesh.world)
    saver.await_copy()
    return problems + [saved.problem for saved in ended]


def test_ranks_wait_for_the_first_to_begin(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(save_in, 2, str(tmp_path), 0.1) == [["", ""], ["", ""]]
    Opened(Directory(tmp_path), NAME).verify()


def test_ranks_do_not_wait_for_what_cannot_begin(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(save_in, 2, str(tmp_path), 0.0)
    assert first == ["", f"{tmp_path}: No space left on device"]
    assert second == ["", "rank 0 has given it up"]


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
    settings = {"batch_size": 4, "steps": 6} | changes
    return shoal.Run(
        model=model,
        loss=lambda output, target: (output.abs() - target).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(inputs, torch.zeros(8, 1)),
        **settings,
    )


def trainer_of(run: Run, store: Directory, **keeping: Any) -> Trainer:
    plan = resolve(run, "data=1", 1)
    origin = Origin("r.py:f", {}, str(plan), 1, len(run.data), {})
    keeper = Keeper(Keeping(store, origin, **keeping), lambda event, **what: None)
    return Trainer(run, plan, LauncherSeat(World()), keeper=keeper)


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
    saved = Opened(store, "step-00000002").whole("model.teacher")
    assert torch.equal(saved, before)
    assert Opened(store, "step-00000003").whole("model.teacher")[0] > before[0]


class Spectrum(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        if kind == "sparse buffer":
            self.register_buffer("table", torch.eye(3).to_sparse())
        elif kind == "parameter":
            self.table = nn.Parameter(torch.ones(2, dtype=torch.complex128), requires_grad=False)
        else:
            self.register_buffer("table", torch.ones(2, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("buffer", "table is complex128"),
        ("parameter", "table is complex128"),
        ("sparse buffer", "table is sparse_coo, not dense"),
    ],
)
def test_a_model_that_no_checkpoint_can_hold(tmp_path: Path, kind: str, told: str) -> None:
    """Refused before the first step if checkpoints are asked for, and trained without otherwise."""
    run, store = run_of(lambda: Spectrum(kind)), Directory(tmp_path)
    assert unholdable(run.make_model()) == told and not unholdable(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=told), trainer_of(run, store):
        pytest.fail("it began")
    if kind == "buffer":
        with trainer_of(run, store, is_asked=False) as trainer:
            assert [info.step for info in trainer] == list(range(1, 7))
    assert store.names() == []


def test_a_script_does_not_end_as_if_its_end_were_saved(tmp_path: Path) -> None:
    run = run_of(lambda: nn.Linear(3, 1))
    with (
        pytest.raises(NotSaved, match=r"Step 6, the last, could not be saved: .*: No space"),
        trainer_of(run, Full(tmp_path), others_may_write=True) as trainer,
    ):
        assert len(list(trainer)) == 6
