"""Directories of torch.distributed.checkpoint: both ways, and no code of a `.metadata` runs."""

import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shoal.checkpoint.load import CheckpointReader
from shoal.errors import BadCheckpoint
from shoal.formats import safe_unpickle
from shoal.formats.dcp import METADATA, export_dcp, open_dcp
from shoal.formats.weights import ModelWeights
from shoal.parallel.layout import Slice
from tests.unit.checkpoint.made import NAME, make, tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def own() -> dict[str, torch.Tensor]:
    names = [name for name in tensors() if name.startswith("model.")]
    return {name.removeprefix("model."): tensors()[name] for name in names}


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    export_dcp(
        ModelWeights(CheckpointReader(make(tmp_path / "from", tensors()), NAME)), tmp_path / "dcp"
    )
    loaded = {name: torch.zeros_like(tensor) for name, tensor in own().items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in own().items())
    assert sorted(os.listdir(tmp_path)) == ["dcp", "from"]
    found = open_dcp(tmp_path / "dcp")
    assert all(torch.equal(found.whole(f"model.{name}"), own()[name]) for name in own())
    assert set(found) == {f"model.{name}" for name in own()}


def test_a_nested_one_is_read_by_prefix(tmp_path: Path) -> None:
    state = {"model": own(), "optim": {"lr": 0.1, "moment": torch.ones(2)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = open_dcp(tmp_path)
    assert set(found.left_out) == {"optim.lr", "step"}
    inner = found.under("model.")
    assert all(torch.equal(inner.whole(f"model.{name}"), own()[name]) for name in own())
    assert "optim.moment" in inner.left_out


def sharded(path: Path, **changes) -> torch.Tensor:
    """A tensor of two parts in two files, as two ranks would write it."""
    whole = torch.arange(24.0).view(6, 4)
    chunks, stored = [], {}
    for i, start in enumerate((0, 4)):
        part = whole[start : start + 4].clone()
        file = f"__{i}_0.distcp"
        torch.save(part, path / file)
        offset = torch.Size([start, 0])
        chunks.append(ChunkStorageMetadata(offset, torch.Size(part.shape)))
        info = {"relative_path": file, "offset": 0, "length": (path / file).stat().st_size}
        stored[MetadataIndex("w", offset)] = _StorageInfo(**{**info, **changes})
    described = TensorStorageMetadata(TensorProperties(dtype=torch.float32), whole.shape, chunks)
    metadata = Metadata({"w": described}, None, stored)
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    return whole


def test_parts_of_several_ranks_are_joined(tmp_path: Path) -> None:
    whole = sharded(tmp_path)
    found = open_dcp(tmp_path)
    assert torch.equal(found.whole("model.w"), whole)
    part = torch.zeros(3, 2)
    found.fill("model.w", [Slice(part, (6, 4), (3, 1))])
    assert torch.equal(part, whole[3:6, 1:3])


def test_a_changed_part_is_noticed(tmp_path: Path) -> None:
    sharded(tmp_path)
    file = tmp_path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(torch.tensor([16.0, 17.0]).numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match="not those that were written"):
        open_dcp(tmp_path).whole("model.w")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relative_path": "../w"}, "no plain name"),
        ({"relative_path": "/etc/passwd"}, "no plain name"),
        ({"relative_path": "missing"}, "is missing"),
        ({"length": 10**6}, "were to be there"),
        ({"offset": -1}, "no whole number"),
        ({"offset": "0"}, "no whole number"),
        ({"transform_descriptors": ["zstd"]}, "transformed"),
    ],
)
def test_what_is_not_consistent_is_refused(changes, words: str, tmp_path: Path) -> None:
    sharded(tmp_path, **changes)
    with pytest.raises(BadCheckpoint, match=words):
        open_dcp(tmp_path)


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    chunks = metadata.state_dict_metadata["w"].chunks
    last = chunks.pop()
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadCheckpoint, match="do not cover"):
        open_dcp(tmp_path)
    chunks += [last, ChunkStorageMetadata(torch.Size([1, 1]), torch.Size([1, 1]))]
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadCheckpoint, match="does not say where"):
        open_dcp(tmp_path)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_metadata_runs_no_code(protocol: int, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    (tmp_path / METADATA).write_bytes(pickle.dumps(Evil(proof), protocol))
    with pytest.raises(BadCheckpoint, match="is refused") as refused:
        open_dcp(tmp_path)
    if protocol >= 2:
        assert "it asks for posix.system" in str(refused.value)
    assert not proof.exists()


def test_known_classes_cannot_be_misused(tmp_path: Path) -> None:
    known = {"torch.Size", "pathlib.PosixPath"}
    path = "ctorch\nSize\n"
    programs = {
        f"\x80\x02{path})R.": None,  # an object of its class, and no more
        f"\x80\x02{path})R)R.": "calls what is no class",
        f"\x80\x02{path}}}b.": "changes what is no object",
        "\x80\x02)]a.": "appends to what is no list",
        "\x80\x02](K\x01K\x02u.": "sets items of what is no dict",
        "\x80\x02cos\nsystem\n.": "asks for os.system",
        "\x80\x02(S'echo'\nios\nsystem\n.": "instruction STRING",
        "\x80\x02\x82\x01.": "instruction EXT1",
        "\x80\x02K\x05Q.": "instruction BINPERSID",
        "\x80\x02h\x07.": "no sound pickle",
        "\x80\x02K\x01K\x02.": "no sound pickle",
        "\x80\x02": "no sound pickle",
        "": "no sound pickle",
        "\x80\x02" + "N" * 200_000: "piles up values",
        "\xff": "no sound pickle",
    }
    for program, words in programs.items():
        content = program.encode("latin-1")
        if words is None:
            assert safe_unpickle.safe_unpickle(content, known).kind == "torch.Size"
        else:
            with pytest.raises(safe_unpickle.UnsafePickle, match=words):
                safe_unpickle.safe_unpickle(content, known)


def test_every_cut_and_flip_of_a_metadata_is_read_or_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    content = (tmp_path / METADATA).read_bytes()
    for at in range(0, len(content), 5):
        for changed in (content[:at], content[:at] + bytes([content[at] ^ 9]) + content[at + 1 :]):
            (tmp_path / METADATA).write_bytes(changed)
            with suppress(BadCheckpoint):
                open_dcp(tmp_path)
