"""Packs: what goes in comes out, bit for bit; what was damaged is refused in a sentence."""

from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shoal.errors import BadCheckpoint, UsageError
from shoal.formats import packed
from shoal.formats.open_weights import open_weights
from shoal.formats.packed import PackReader, is_pack, unpack, unpacked, write_pack


def weights(path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(300, 70),
        "half": torch.randn(999).to(torch.bfloat16),
        "steps": torch.arange(50),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
    }
    save_file(tensors, path)
    return path


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]))
def test_planes_are_joined_again(content: bytes, width: int) -> None:
    assert packed._join_planes(packed._planes(content, width), width) == content


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=4), st.integers(1, 64))
def test_any_files_come_back(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], block: int
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    (folder / "in" / "deep").mkdir(parents=True)
    for number, content in enumerate(contents):
        (folder / "in" / ("deep" if number % 2 else ".") / f"{number}").write_bytes(content)
    before, packed.BLOCK_BYTES = packed.BLOCK_BYTES, block
    try:
        write_pack(folder / "in", folder / "pack")
        unpack(folder / "pack", folder / "out")
    finally:
        packed.BLOCK_BYTES = before
    files = [p for p in (folder / "in").rglob("*") if p.is_file()]
    for file in files:
        assert (folder / "out" / file.relative_to(folder / "in")).read_bytes() == file.read_bytes()


def test_weights_become_smaller_and_come_back(tmp_path: Path) -> None:
    file = weights(tmp_path / "model.safetensors")
    sizes = write_pack(file, tmp_path / "pack")
    assert sizes.before == file.stat().st_size
    assert sizes.after == (tmp_path / "pack").stat().st_size < 0.95 * sizes.before
    assert is_pack(tmp_path / "pack") and not is_pack(file)
    unpack(tmp_path / "pack", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    with unpacked(tmp_path / "pack") as place:
        assert place.name == "model.safetensors" and place.read_bytes() == file.read_bytes()
    assert not place.exists()


@pytest.mark.parametrize("place", [0, 3, 0.2, 0.5, 0.8, -60, -20, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, place: float) -> None:
    write_pack(weights(tmp_path / "model.safetensors"), tmp_path / "pack")
    content = bytearray((tmp_path / "pack").read_bytes())
    content[int(place * len(content)) if 0 < place < 1 else int(place)] ^= 16
    (tmp_path / "pack").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"damaged pack|no packed file"):
        unpack(tmp_path / "pack", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"pack", "model.safetensors"}


@pytest.mark.parametrize("length", [0, 8, 20, 1000])
def test_a_pack_that_is_cut_off_is_found(tmp_path: Path, length: int) -> None:
    write_pack(weights(tmp_path / "model.safetensors"), tmp_path / "pack")
    (tmp_path / "pack").write_bytes((tmp_path / "pack").read_bytes()[:length])
    with pytest.raises(BadCheckpoint):
        PackReader(tmp_path / "pack")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a//b", ""])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    index = msgspec.json.encode(
        {"is_directory": True, "files": [{"name": name, "num_bytes": 0, "hash": "", "blocks": []}]}
    )
    tail = len(index).to_bytes(8, "little") + xxhash.xxh3_128_digest(index) + packed.MARK
    (tmp_path / "pack").write_bytes(packed.MARK + index + tail)
    with pytest.raises(BadCheckpoint, match="plain name"):
        unpack(tmp_path / "pack", tmp_path / "out")


def test_weights_in_a_pack_are_to_be_unpacked(tmp_path: Path) -> None:
    write_pack(weights(tmp_path / "model.safetensors"), tmp_path / "pack")
    with pytest.raises(UsageError, match="Unpack it first: shoal pack"):
        open_weights(tmp_path / "pack")


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    file = weights(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="is there already"):
        write_pack(file, file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no files"):
        write_pack(tmp_path / "empty", tmp_path / "pack")
