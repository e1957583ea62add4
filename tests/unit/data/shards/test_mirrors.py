"""Sets in several places: built in all, read from the first that is sound, caught up by sync."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.cli.main import run_here
from shoal.data.shard_files import drafts
from shoal.data.shard_files.format import BadShards
from shoal.data.shard_files.locations import open_location, read_index
from shoal.data.shard_files.syncing import sync
from shoal.data.shard_files.verifying import find_faults
from shoal.errors import UsageError

VALUES = torch.arange(200.0).reshape(100, 2)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a", tmp_path / "b"


def mirror(places: tuple[Path, Path], quorum: str = "") -> str:
    return f"mirror://{quorum}[{places[0]},{places[1]}]"


@pytest.fixture
def built(places: tuple[Path, Path]) -> str:
    shoal.data.build(shoal.data.tensors(VALUES, VALUES), mirror(places), shard_bytes=400)
    return mirror(places)


def content(where: str) -> Any:
    return shoal.data.shards(where).take(np.arange(100))[0]


def flip(path: Path, at: int = 8) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def test_a_build_goes_to_all(built: str, places: tuple[Path, Path]) -> None:
    for each in places:
        assert content(str(each)).equal(VALUES)
    assert content(built).equal(VALUES)
    seals = {read_index(open_location(each)).digest for each in places}
    assert len(seals) == 1


@pytest.mark.parametrize("how", ["changed", "cut", "gone", "all gone"])
def test_a_read_falls_over(built: str, places: tuple[Path, Path], how: str) -> None:
    shard = places[0] / "shard-00001.bin"
    if how == "changed":
        flip(shard)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "gone":
        shard.unlink()
    else:
        shutil.rmtree(places[0])
    assert content(built).equal(VALUES)
    if how != "all gone":
        assert any(find_faults(open_location(built), read_index(open_location(built))))


def test_both_damaged_is_an_error(built: str, places: tuple[Path, Path]) -> None:
    for each in places:
        flip(each / "shard-00001.bin")
    with pytest.raises(shoal.ShoalError, match="shard-00001"):
        content(built)


def test_a_place_is_caught_up(built: str, places: tuple[Path, Path]) -> None:
    assert sync(places[0], places[1]).num_shards == 0  # it is whole
    flip(places[1] / "shard-00002.bin")
    assert sync(built, places[1]).num_shards > 0
    assert content(str(places[1])).equal(VALUES)
    shutil.rmtree(places[1])
    sync(places[0], mirror(places))
    assert content(str(places[1])).equal(VALUES)
    assert not any(find_faults(open_location(built), read_index(open_location(built))))


def test_a_damaged_source_is_not_copied(
    built: str, places: tuple[Path, Path], tmp_path: Path
) -> None:
    flip(places[0] / "shard-00001.bin")
    with pytest.raises(BadShards, match="It is not copied"):
        sync(places[0], tmp_path / "c")
    assert not (tmp_path / "c").exists()
    sync(built, tmp_path / "c")  # the other has it sound
    assert content(str(tmp_path / "c")).equal(VALUES)


def test_another_set_is_not_replaced(built: str, places: tuple[Path, Path], tmp_path: Path) -> None:
    shoal.data.build(shoal.data.tensors(VALUES + 1, VALUES), tmp_path / "c", shard_bytes=400)
    with pytest.raises(UsageError, match="holds a set already"):
        sync(built, tmp_path / "c")
    sync(built, tmp_path / "c", force=True)
    assert content(str(tmp_path / "c")).equal(VALUES)


def test_half_a_mirror(places: tuple[Path, Path], tmp_path: Path) -> None:
    """A place that cannot be written: refused unless one is enough, and told how to go on."""
    places[1].write_text("no directory")
    data = shoal.data.tensors(VALUES, VALUES)
    with pytest.raises(UsageError, match=r"1 of 2 places in all, where 2 were.*shoal data sync"):
        shoal.data.build(data, mirror(places), shard_bytes=400)
    shutil.rmtree(places[0])
    shoal.data.build(data, mirror(places, "1"), shard_bytes=400)
    assert content(mirror(places)).equal(VALUES)


@pytest.mark.parametrize("kind", ["directory", "url"])
def test_a_copy_that_is_cut_short_goes_on(
    built: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The target goes away after some shards, and comes back: these are not copied again."""
    target = str(tmp_path / "c") if kind == "directory" else "memory://sets/c"
    draft = drafts.FolderDraft if kind == "directory" else drafts.BucketDraft
    write, room = draft.write, [3]  # a note, and two shards

    def until_it_is_away(self: Any, file: str, parts: Any) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(5, "it is away")
        write(self, file, parts)

    with monkeypatch.context() as patched:
        patched.setattr(draft, "write", until_it_is_away)
        with pytest.raises(UsageError, match=r"cannot be written: it is away.*what was copied is"):
            sync(built, target)
    with pytest.raises(UsageError, match="holds no set"):
        shoal.data.shards(target)
    num_shards = len(read_index(open_location(built)).shards)
    assert num_shards > 3 and sync(built, target).num_shards == num_shards - 2
    copies = {} if kind == "directory" else {"cache_dir": tmp_path / "copies"}
    assert shoal.data.shards(target, **copies).take(np.arange(100))[0].equal(VALUES)


def test_a_mirror_with_a_url(memory: Any, tmp_path: Path) -> None:
    where = f"mirror://[memory://sets/a,{tmp_path}/b]"
    shoal.data.build(shoal.data.tensors(VALUES, VALUES), where, shard_bytes=400)
    found = shoal.data.shards(where, tmp_path / "copies")
    shutil.rmtree(tmp_path / "b")
    assert found.take(np.arange(100))[0].equal(VALUES)
    memory.rm("/sets/a/shard-00003.bin")
    with pytest.raises(shoal.ShoalError):
        shoal.data.shards(where, tmp_path / "others").take(np.arange(100))


def test_the_verb(built: str, places: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    assert run_here(["data", "sync", built, str(tmp_path / "c"), "--json"]) == 0
    assert '"shards":' in capsys.readouterr().out
    assert run_here(["data", "sync", built, str(tmp_path / "c")]) == 0
    assert "holds the set already" in capsys.readouterr().out
    assert run_here(["data", "sync", str(tmp_path / "none"), str(tmp_path / "c")]) == 2
