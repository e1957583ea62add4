"""Whatever happens to the bytes of a checkpoint is noticed, and the file or tensor is named."""

import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES
from shoal.errors import BadCheckpoint
from shoal.storage.store import SEAL, DirectoryStore
from tests.unit.checkpoint.made import NAME, make, tensors

FILES = ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST, SEAL]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def good(directory: Path) -> Path:
    """A good checkpoint of two files; beside it `older`, which has the same names and sizes."""
    make(directory, tensors(0))
    make(directory, tensors(1), name="older", step=10)
    return directory / NAME


def refusal(checkpoint: Path) -> str:
    """Why a checkpoint is refused; fails if it is not."""
    with pytest.raises(BadCheckpoint) as refused:
        CheckpointReader(DirectoryStore(checkpoint.parent), checkpoint.name).verify()
    return str(refused.value)


def test_a_good_one_is_accepted_and_read(good: Path) -> None:
    opened = CheckpointReader(DirectoryStore(good.parent), good.name)
    opened.verify()
    opened.verify(num_threads=2)
    state = tensors(0)
    assert sorted(opened) == sorted(state) and "model.other" not in opened
    assert all(torch.equal(opened.whole(name), tensor) for name, tensor in state.items())
    assert opened.num_bytes == sum(file.stat().st_size for file in good.iterdir())


# ---- random changes


def put(file: Path, content: bytes | bytearray) -> None:
    """As a new file: many file systems wait for the disk when an old one is written over."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


# Each changes something, and returns the files of which one is to be named.


def flip(good: Path, draw: random.Random) -> list[str]:
    file = good / draw.choice(FILES)
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    put(file, content)
    return [file.name]


def truncate(good: Path, draw: random.Random) -> list[str]:
    file = good / draw.choice(FILES)
    put(file, file.read_bytes()[: draw.randrange(file.stat().st_size)])
    return [file.name]


def lengthen(good: Path, draw: random.Random) -> list[str]:
    file = good / draw.choice(FILES)
    put(file, file.read_bytes() + draw.randbytes(draw.randint(1, 50)))
    return [file.name]


def overwrite(good: Path, draw: random.Random) -> list[str]:
    """Some bytes in a row, with others or with zeros."""
    file = good / draw.choice(FILES)
    content = bytearray(before := file.read_bytes())
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.randint(1, 600))
    content[start:stop] = (
        bytes(stop - start) if draw.random() < 0.5 else draw.randbytes(stop - start)
    )
    if content == before:
        content[start] ^= 255
    put(file, content)
    return [file.name]


def chunks(good: Path) -> list[tuple[str, int, int]]:
    """Each chunk's file, first byte and length."""
    manifest = msgspec.json.decode((good / MANIFEST).read_bytes(), type=manifests.Manifest)
    return [
        (manifest.files[chunk.file].name, chunk.start, tensor.num_bytes(chunk))
        for tensor, chunk in manifest.chunks()
    ]


def swap_chunks(good: Path, draw: random.Random) -> list[str]:
    """Two of one length change places, perhaps across files."""
    listed = chunks(good)
    length = draw.choice([n for _, _, n in listed if sum(n == m for _, _, m in listed) > 1])
    (file, start, _), (other, at, _) = draw.sample([one for one in listed if one[2] == length], 2)
    contents = {name: bytearray((good / name).read_bytes()) for name in FILES[:2]}
    first = bytes(contents[file][start : start + length])
    second = bytes(contents[other][at : at + length])
    contents[file][start : start + length] = second
    contents[other][at : at + length] = first
    for name, content in contents.items():
        put(good / name, content)
    return [file, other]


def stale_chunk(good: Path, draw: random.Random) -> list[str]:
    """A chunk as it was in an older checkpoint."""
    file, start, length = draw.choice(
        [one for one in chunks(good) if bytes_at(good, one) != bytes_at(good.parent / "older", one)]
    )
    content = bytearray((good / file).read_bytes())
    content[start : start + length] = bytes_at(good.parent / "older", (file, start, length))
    put(good / file, content)
    return [file]


def bytes_at(checkpoint: Path, chunk: tuple[str, int, int]) -> bytes:
    file, start, length = chunk
    return (checkpoint / file).read_bytes()[start : start + length]


def stale_file(good: Path, draw: random.Random) -> list[str]:
    file = draw.choice(FILES)
    put(good / file, (good.parent / "older" / file).read_bytes())
    return [file]


def swap_files(good: Path, draw: random.Random) -> list[str]:
    one, other = draw.sample(FILES, 2)
    os.rename(good / one, good / "aside")
    os.rename(good / other, good / one)
    os.rename(good / "aside", good / other)
    return [one, other]


def remove(good: Path, draw: random.Random) -> list[str]:
    files = draw.sample(FILES, draw.randint(1, 3))
    for file in files:
        os.unlink(good / file)
    return files


def add(good: Path, draw: random.Random) -> list[str]:
    extra = draw.choice(["rank-00002.safetensors", "notes.txt", ".hidden", "part-00000.json"])
    put(good / extra, draw.randbytes(10))
    return [extra]


CHANGES = [
    *[flip] * 8,
    *[truncate, lengthen, overwrite, swap_chunks, stale_chunk] * 2,
    *[stale_file, swap_files, remove, add],
]


@pytest.mark.parametrize("num_changes", [220, pytest.param(2000, marks=pytest.mark.full)])
def test_no_change_is_accepted(good: Path, num_changes: int) -> None:
    contents = {file: (good / file).read_bytes() for file in FILES}
    draw = random.Random(0)
    for number in range(num_changes):
        change = CHANGES[number % len(CHANGES)]
        touched = change(good, draw)
        told = refusal(good)
        assert any(name in told for name in touched), f"{change.__name__} of {touched}: {told}"
        restore(good, contents)
    CheckpointReader(DirectoryStore(good.parent), good.name).verify()


def restore(good: Path, contents: dict[str, bytes]) -> None:
    for file in good.iterdir():
        if file.name not in contents:
            file.unlink()
    for file, content in contents.items():
        if not (good / file).exists() or (good / file).read_bytes() != content:
            put(good / file, content)


# ---- what is not a file with bytes


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / NAME))


@pytest.mark.parametrize("file", FILES)
def test_a_link_is_refused(copy: Path, tmp_path: Path, file: str) -> None:
    os.rename(copy / file, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", copy / file)
    assert refusal(copy).startswith(f"{file} cannot be opened")


@pytest.mark.parametrize("file", FILES)
def test_a_pipe_is_refused_and_not_waited_for(copy: Path, file: str) -> None:
    os.unlink(copy / file)
    os.mkfifo(copy / file)
    assert refusal(copy) == f"{file} is not a file."


@pytest.mark.parametrize("file", FILES)
def test_a_directory_is_refused(copy: Path, file: str) -> None:
    os.unlink(copy / file)
    (copy / file).mkdir()
    assert refusal(copy) == f"{file} is not a file."


def test_a_device_is_refused(copy: Path) -> None:
    os.unlink(copy / FILES[0])
    os.symlink("/dev/zero", copy / FILES[0])
    assert refusal(copy).startswith(f"{FILES[0]} cannot be opened")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    assert refusal(tmp_path / "step-1") == f"{MANIFEST} is missing."
    assert refusal(tmp_path / "step-2") == f"{MANIFEST} is missing."


# ---- forgeries: everything is sealed and hashed, and still wrong

PICKLE = (
    b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x01x\x85R."
)


def forge(copy: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and seal it again."""
    manifest = msgspec.json.decode((copy / MANIFEST).read_bytes())
    change(manifest)
    seal(copy, msgspec.json.encode(manifest))


def seal(copy: Path, content: bytes) -> None:
    (copy / MANIFEST).write_bytes(content)
    (copy / SEAL).write_bytes(manifests.seal(content))


def put_header(copy: Path, content: bytes) -> None:
    """Write these bytes over the first file's header, as if they had always been there."""
    file = copy / FILES[0]

    def change(manifest: dict[str, Any]) -> None:
        length = manifest["files"][0]["header_bytes"]
        whole = content[:length] + file.read_bytes()[min(length, len(content)) :]
        file.write_bytes(whole)
        manifest["files"][0]["header_hash"] = xxhash.xxh3_128_hexdigest(whole[:length])

    forge(copy, change)


def header_of(copy: Path) -> tuple[int, bytes]:
    content = (copy / FILES[0]).read_bytes()
    length = int.from_bytes(content[:8], "little")
    return length, content[8 : 8 + length]


def changed_header(copy: Path, before: str, after: str) -> bytes:
    length, text = header_of(copy)
    text = text.replace(before.encode(), after.encode(), 1)
    return length.to_bytes(8, "little") + text.rstrip().ljust(length)


@pytest.mark.parametrize(
    ("make_header", "words"),
    [
        (lambda copy: PICKLE, "the header says that it has"),
        (lambda copy: b"PK\x03\x04", "the header says that it has"),
        (lambda copy: (2**63).to_bytes(8, "little"), f"says that it has {2**63 + 8} bytes"),
        (lambda copy: (2**64 - 1).to_bytes(8, "little"), f"says that it has {2**64 + 7} bytes"),
        (lambda copy: bytes(8), "says that it has 8 bytes"),
        (lambda copy: header_of(copy)[0].to_bytes(8, "little") + PICKLE, "does not describe"),
        (lambda copy: header_of(copy)[0].to_bytes(8, "little") + b"[" * 300, "does not describe"),
        (lambda copy: header_of(copy)[0].to_bytes(8, "little") + b"\xff" * 300, "not describe"),
        (lambda copy: changed_header(copy, '"F64"', '"I64"'), "does not describe"),
        (lambda copy: changed_header(copy, "model.", "mOdel."), "does not describe"),
        (lambda copy: changed_header(copy, '"data_offsets":[0', '"data_offsets":[8'), "not descri"),
    ],
)
def test_a_header_that_lies_is_refused(copy: Path, make_header, words: str) -> None:
    put_header(copy, make_header(copy))
    told = refusal(copy)
    assert words in told and told.startswith(FILES[0])


def test_a_pickle_under_a_safetensors_name_is_refused(copy: Path) -> None:
    (copy / FILES[0]).write_bytes(PICKLE)
    assert refusal(copy).startswith(f"{FILES[0]} has {len(PICKLE)} bytes")


def first(manifest: dict[str, Any]) -> dict[str, Any]:
    return next(tensor for tensor in manifest["tensors"] if tensor["name"] == "model.cut")


def chunk(manifest: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return first(manifest)["chunks"][number]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["files"][0].update(name="../step-1/x"), "not a plain name"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "not a plain name"),
        (lambda m: m["files"][0].update(name="a/b"), "not a plain name"),
        (lambda m: m["files"][0].update(name=".."), "not a plain name"),
        (lambda m: m["files"][0].update(name="a\0b"), "not a plain name"),
        (lambda m: m["files"][0].update(name="other"), "does not belong to it"),
        (lambda m: m["files"][0].update(name=MANIFEST), "does not belong to it"),
        (lambda m: m.update(version=2), "version 2; this Shoal reads version 1"),
        (lambda m: m.update(version=0), "version 0; this Shoal reads version 1"),
        (lambda m: m.update(format="dcp"), "format 'dcp'"),
        (lambda m: m["files"][0].update(header_bytes=2**63), "rank-00000"),
        (lambda m: m["files"][0].update(header_bytes=2**80), "rank-00000"),
        (lambda m: m["files"][0].update(num_bytes=2**63), "rank-00000"),
        (lambda m: chunk(m).update(start=2**62), "rank-00000"),
        (lambda m: chunk(m).update(start=-8), "rank-00000"),
        (lambda m: chunk(m).update(start=chunk(m)["start"] + 8), "rank-00000"),
        (lambda m: chunk(m).update(offset=[1, 0]), "model.cut"),
        (lambda m: chunk(m).update(shape=[2**40, 2**40]), "model.cut"),
        (lambda m: first(m).update(shape=[2**40, 6]), "model.cut"),
        (lambda m: first(m).update(shape=[8] * 1000), "model.cut"),
        (lambda m: first(m).update(dtype="F16"), "rank-00000"),
        (lambda m: first(m).update(dtype="I32"), "does not describe"),
        (lambda m: first(m).update(name="model.uncut"), "does not describe"),
        (lambda m: chunk(m).update(hash="0" * 32), "model.cut"),
        (lambda m: m["tensors"].pop(), "belong to no chunk"),
        (lambda m: m["files"].pop(), "there is no file 1"),
    ],
)
def test_a_sealed_forgery_is_refused(copy: Path, change, words: str) -> None:
    forge(copy, change)
    assert words in refusal(copy)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        PICKLE,
        b"[" * 1_000_000,
        b'{"format":"shoal-checkpoint","version":1,"plain":' + b'{"a":' * 100_000,
        b'{"format":"\xff\xfe"}',
        b'{"format":"shoal-checkpoint","version":1e400}',
        b'{"format":"shoal-checkpoint","version":1' + b"0" * 5000 + b"}",
        b"\0" * 1000,
    ],
)
def test_a_sealed_manifest_of_nonsense_is_refused(copy: Path, content: bytes) -> None:
    seal(copy, content)
    assert MANIFEST in refusal(copy)


def test_a_huge_manifest_is_refused_unread(copy: Path) -> None:
    """Sparse files: they cost neither time nor memory."""
    before, started = peak_bytes(), time.process_time()
    os.truncate(copy / MANIFEST, MOST_MANIFEST_BYTES + 1)
    assert refusal(copy).startswith(f"{MANIFEST} has {MOST_MANIFEST_BYTES + 1} bytes")
    seal(copy, b"{}")
    os.truncate(copy / SEAL, 1 << 30)
    assert refusal(copy).startswith(f"{SEAL} has {1 << 30} bytes")
    assert time.process_time() - started < 1.0
    assert peak_bytes() - before < 64 << 20


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
