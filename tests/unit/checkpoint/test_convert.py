"""`shoal checkpoint convert`: a good checkpoint written anew, whole or not at all."""

import os
from pathlib import Path

import pytest
import torch

from shoal import faults
from shoal.checkpoint.compare import compare_checkpoints
from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.signing import VARIABLE
from shoal.cli.main import run_here
from shoal.faults import Fault
from shoal.storage.store import SEAL, DirectoryStore
from tests.unit.checkpoint.conftest import Said
from tests.unit.checkpoint.made import NAME, make, tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {**tensors(), "model.large": torch.randn(3000, 100)}
    make(tmp_path / "a", state, metrics={"loss": 0.5})
    return tmp_path / "a" / NAME


def flip(file: Path, place: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.unlink()
    file.write_bytes(content)


def key_file(path: Path, text: str) -> Path:
    path.write_text(text * 8)
    path.chmod(0o600)
    return path


def test_it_is_the_same_checkpoint_elsewhere(source: Path, tmp_path: Path, capsys) -> None:
    said = Said(capsys, "convert", source, tmp_path / "b" / "c")
    assert said.code == 0 and "step 20" in said.out and "in 2 files, not signed" in said.out
    made = tmp_path / "b" / "c"
    assert {file: (made / file).read_bytes() for file in os.listdir(made)} == {
        file: (source / file).read_bytes() for file in os.listdir(source)
    }
    assert os.listdir(tmp_path / "b") == ["c"]


@pytest.mark.parametrize("num_files", [1, 3])
def test_it_is_dealt_to_as_many_files(source: Path, tmp_path: Path, num_files: int, capsys) -> None:
    said = Said(capsys, "convert", source, tmp_path / "b", "--files", num_files)
    assert said.code == 0, said.err
    made = CheckpointReader(DirectoryStore(tmp_path), "b")
    made.verify()
    sizes = [file.num_bytes for file in made.manifest.files]
    assert len(sizes) == num_files and max(sizes) < 1.5 * min(sizes)
    assert len(os.listdir(tmp_path / "b")) == num_files + 2
    assert not compare_checkpoints(CheckpointReader(DirectoryStore(source.parent), NAME), made)


def test_a_bad_one_is_not_written_anew(source: Path, tmp_path: Path, capsys) -> None:
    flip(source / "rank-00001.safetensors")
    for more in ([], ["--files", 2]):
        said = Said(capsys, "convert", source, tmp_path / "b", *more)
        assert said.code == 2 and "rank-00001.safetensors: the bytes of" in said.err
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_of_several_the_newest_good_one_is_taken(source: Path, tmp_path: Path, capsys) -> None:
    for step in (30, 100_000_000):  # a step of nine digits is later, though its name is not
        make(source.parent, tensors(step), name=f"step-{step:08d}", step=step)
    flip(source.parent / "step-100000000" / "rank-00000.safetensors")
    said = Said(capsys, "convert", tmp_path / "a", tmp_path / "b")
    assert said.code == 0 and "step 30" in said.out
    passed_over, taken = said.err.splitlines()
    assert passed_over.startswith("step-100000000 was passed over: rank-00000.safetensors")
    assert taken.startswith("step-00000030 is taken, the newest good one of 3")


def test_what_is_there_stays(source: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for target in ("b", "link", f"a/{NAME}"):
        said = Said(capsys, "convert", source, tmp_path / target)
        assert said.code == 2 and "is there already" in said.err
    assert "begins with a dot" in Said(capsys, "convert", source, tmp_path / ".b").err
    CheckpointReader(DirectoryStore(source.parent), NAME).verify()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link"]


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    for more in ([], ["--files", 2]):
        fault = Fault("checkpoint.after_chunk", "full", None, None)
        monkeypatch.setattr(faults, "_armed", [fault])
        said = Said(capsys, "convert", source, tmp_path / "b", *more)
        assert said.code == 2 and "cannot be written: No space left" in said.err
        assert os.listdir(tmp_path) == ["a"]


def test_it_is_signed_anew(source: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    old, new = key_file(tmp_path / "old", "old key!"), key_file(tmp_path / "new", "new key!")
    monkeypatch.setenv(VARIABLE, str(old))
    refused = Said(capsys, "convert", source, tmp_path / "b")
    assert refused.code == 2 and "It is not signed" in refused.err
    said = Said(capsys, "convert", source, tmp_path / "b", "--source-key", "none")
    assert said.code == 0 and ", signed." in said.out
    monkeypatch.setenv(VARIABLE, str(new))
    refused = Said(capsys, "convert", tmp_path / "b", tmp_path / "c")
    assert refused.code == 2 and "not signed with this key" in refused.err
    assert Said(capsys, "convert", tmp_path / "b", tmp_path / "c", "--source-key", old).code == 0
    CheckpointReader(DirectoryStore(tmp_path), "c").verify()
    assert (tmp_path / "c" / SEAL).read_bytes() == (source / SEAL).read_bytes()
    monkeypatch.delenv(VARIABLE)
    assert Said(capsys, "convert", tmp_path / "c", tmp_path / "d").code == 0
    assert set(os.listdir(tmp_path / "d")) == set(os.listdir(source))
    wrong = Said(capsys, "convert", source, tmp_path / "e", "--source-key", tmp_path / "no")
    assert wrong.code == 2 and "--source-key names" in wrong.err


def test_an_import_is_signed_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(key_file(tmp_path / "key", "the key!")))
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    assert run_here(["checkpoint", "import", str(tmp_path / "m.pt"), str(tmp_path / "a")]) == 0
    assert run_here(["checkpoint", "verify", str(tmp_path / "a")]) == 0
