"""Which checkpoints a path stands for: links are named, and of several the newest good one."""

import os
import shutil
from pathlib import Path

import pytest

from shoal.checkpoint.find import (
    checkpoint_name,
    checkpoint_step,
    find_checkpoints,
    list_steps,
    open_newest,
)
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.cli.main import run_here
from shoal.errors import BadCheckpoint, UsageError
from shoal.formats.open_weights import open_weights
from shoal.storage.store import DirectoryStore
from shoal.training.resume import newest
from tests.unit.checkpoint.made import NAME, make, tensors
from tests.unit.checkpoint.test_every_call import save

LINK = "step-00000030"


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A run whose newest checkpoint was moved to another disk, with a link in its place."""
    store = make(tmp_path / "run" / "checkpoints", tensors())
    make(tmp_path / "elsewhere", tensors(1), name=LINK, step=30)
    (store.path / LINK).symlink_to(tmp_path / "elsewhere" / LINK)
    (store.path / "latest").symlink_to(NAME)  # only a second name
    return tmp_path / "run"


def test_a_link_is_named_when_it_is_passed_over(
    linked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = f"{LINK} is a link, to {tmp_path / 'elsewhere' / LINK}, and a link"
    store = DirectoryStore(linked / "checkpoints")
    assert store.names() == [NAME, LINK]
    assert newest(store).progress.step == 20
    with pytest.raises(BadCheckpoint, match="is a link"):
        VerifiedCheckpoint(store, LINK)
    assert run_here(["checkpoint", "list", str(linked)]) == 0
    assert told in capsys.readouterr().out
    assert run_here(["checkpoint", "verify", str(linked)]) == 1
    assert f"bad  {LINK}  {told}" in capsys.readouterr().out
    assert run_here(["checkpoint", "show", str(linked)]) == 0
    assert f"{LINK} was passed over: {told}" in capsys.readouterr().err


def test_a_link_alone_is_not_nothing(linked: Path) -> None:
    """A run must not begin anew in silence because it does not follow the link."""
    shutil.rmtree(linked / "checkpoints" / NAME)
    with pytest.raises(BadCheckpoint, match="is a link"):
        newest(DirectoryStore(linked / "checkpoints"))


def test_a_link_that_leads_nowhere_is_named(linked: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "elsewhere")
    found = find_checkpoints(linked)
    assert found.names == [NAME, LINK]
    with pytest.raises(BadCheckpoint, match="is a link"):
        VerifiedCheckpoint(found.store, LINK)


def test_a_link_by_its_own_name_is_meant(linked: Path, tmp_path: Path) -> None:
    for name, step in ((LINK, 30), ("latest", 20)):
        store, (found,) = find_checkpoints(linked / "checkpoints" / name)
        assert VerifiedCheckpoint(store, found).manifest.progress.step == step


def test_a_save_takes_the_place_of_a_link(linked: Path, tmp_path: Path) -> None:
    store = DirectoryStore(linked / "checkpoints")
    for _ in range(2):
        save(store, 30)
        VerifiedCheckpoint(store, LINK).verify()
        assert set(os.listdir(store.path)) == {NAME, LINK, "latest"}
        shutil.rmtree(store.path / LINK)
        (store.path / LINK).symlink_to(tmp_path / "nowhere")
    assert os.listdir(tmp_path / "elsewhere") == [LINK]


def test_of_several_the_newest_good_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30):
        make(run / "checkpoints", tensors(step), name=f"step-{step:08d}", step=step)
    (run / "model.safetensors").touch()  # as a finished run leaves it
    assert open_newest(VerifiedCheckpoint, run).name == "step-00000030"
    file = run / "checkpoints" / "step-00000030" / "rank-00000.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-1] + b"?")
    assert (
        open_newest(VerifiedCheckpoint, run).name == "step-00000030"
    )  # sealed, and not looked through
    found = open_weights(run)
    assert found.place.endswith("step-00000020")
    assert "step-00000030 was passed over: rank-00000.safetensors: the bytes" in found.note
    for step in (10, 20):
        (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"No checkpoint in .* is good. step-00000030 was"):
        open_weights(run)


def test_a_name_of_another_form_is_the_oldest(tmp_path: Path) -> None:
    make(tmp_path, tensors(), name="weights")
    make(tmp_path, tensors(), name=NAME)
    assert open_newest(VerifiedCheckpoint, tmp_path).name == NAME


def test_one_that_is_asked_for_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path, tensors())
    (tmp_path / NAME / "manifest.json").unlink()
    with pytest.raises(BadCheckpoint, match=f"{NAME} is bad: manifest.json is missing"):
        open_weights(tmp_path / NAME)
    with pytest.raises(UsageError, match="There is no"):
        open_weights(tmp_path / "nothing")
    assert find_checkpoints(f"file://{tmp_path}").names == [NAME]


def test_names_are_ordered_by_their_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        make(tmp_path, tensors(), name=checkpoint_name(step), step=step)
    assert list_steps(DirectoryStore(tmp_path)) == ["step-100000000", "step-99999999"]
    assert newest(DirectoryStore(tmp_path)).progress.step == 100_000_000
    for name in ("step-300", "step-0300000000", "step-x", "z-copy", "step-\u0663" * 8):
        assert checkpoint_step(name) is None
