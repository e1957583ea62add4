"""Mirrors: several stores as one; half of them may be away, cut short or damaged."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.commit import new_target, open_draft
from shoal.checkpoint.convert import copy_checkpoint
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.errors import BadCheckpoint, UsageError
from shoal.storage.mirrors import MirroredStore, parse_mirror
from shoal.storage.object_client import StoreError, redact_password, redact_url
from shoal.storage.object_store import open_store
from shoal.storage.store import SEAL, DirectoryStore
from shoal.testing.stores import (
    CONTENT,
    FILE,
    NAME,
    OTHER,
    PART,
    SECOND,
    StoreConformance,
    StoreLocation,
    content_of,
    fill,
    save,
)


def folders(tmp_path: Path, count: int = 2) -> list[Path]:
    return [tmp_path / f"copy{number}" for number in range(count)]


def mirrored(paths: list[Path], quorum: int | None = None) -> MirroredStore:
    return MirroredStore([DirectoryStore(path) for path in paths], quorum or len(paths))


def put_away(path: Path) -> None:
    """As if its mount were gone: nothing can be read or made there."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}-away"))
    path.write_text("no directory")


def bring_back(path: Path) -> None:
    path.unlink()
    away = path.with_name(f"{path.name}-away")
    if away.exists():
        away.rename(path)


class TestMirror(StoreConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StoreLocation:
        paths = folders(tmp_path)

        def damage(name: str, file: str, content: bytes | None) -> None:
            for path in paths:
                (path / name / file).unlink(missing_ok=True)
                if content is not None:
                    (path / name / file).write_bytes(content)

        return StoreLocation(lambda: mirrored(paths), damage)


def test_a_write_goes_to_all_and_a_read_falls_over(tmp_path: Path) -> None:
    paths = folders(tmp_path)
    store = mirrored(paths)
    save(store)
    for path in paths:
        assert content_of(DirectoryStore(path)) == CONTENT
    put_away(paths[0])
    again = mirrored(paths)
    assert again.names() == [NAME] and again.files(NAME) == {FILE, MANIFEST, SEAL}
    assert content_of(again) == CONTENT
    bring_back(paths[0])
    shutil.rmtree(paths[0] / NAME)  # it lost what it had
    assert content_of(mirrored(paths)) == CONTENT


def test_all_must_have_it_unless_a_quorum_is_named(tmp_path: Path) -> None:
    paths = folders(tmp_path, 3)
    put_away(paths[1])
    with pytest.raises(OSError):
        mirrored(paths).create_draft(NAME, "a1")
    save(mirrored(paths, 2))
    bring_back(paths[1])
    store = mirrored(paths, 2)
    assert store.names() == [NAME] and DirectoryStore(paths[1]).names() == []
    put_away(paths[0])
    assert content_of(mirrored(paths, 2)) == CONTENT  # two of three are enough to know it
    bring_back(paths[0])
    put_away(paths[1])
    put_away(paths[2])
    with pytest.raises(StoreError, match=r"1 of 3 stores answer, and 2 are needed.*by itself"):
        mirrored(paths, 2).names()


@pytest.mark.parametrize("lost", [{0: 1}, {1: 1}, {0: 0, 1: 1}, {0: 1, 1: 0}, {0: 1, 1: 1}])
def test_ranks_that_lose_other_stores_leave_no_half(tmp_path: Path, lost: dict[int, int]) -> None:
    """Each rank may lose another store in the middle; none ever shows half a checkpoint."""
    paths = folders(tmp_path)
    ranks = [mirrored(paths, 1), mirrored(paths, 1)]
    first = ranks[0].create_draft(NAME, "a1")
    second = ranks[1].join_draft(NAME, "a1")

    def write(rank: int, draft: Any, file: str) -> None:
        away = paths[lost[rank]] if rank in lost else None
        if away is not None:
            put_away(away)
        draft.write(file, [CONTENT])
        if away is not None:
            bring_back(away)

    write(0, first, FILE)
    write(1, second, SECOND)
    second.write("part-00001.json", [b"{}"])
    first.write(PART, [b"{}"])
    first.write(MANIFEST, [b"manifest"])
    first.write(SEAL, [b"seal"])
    if set(lost.values()) == {0, 1}:  # no store has the files of both
        with pytest.raises(OSError, match="0 of 2 stores have all files"):
            first.commit(drop=[PART, "part-00001.json"])
        first.discard()
    else:
        first.commit(drop=[PART, "part-00001.json"])
    for number, path in enumerate(paths):
        found = DirectoryStore(path)
        if number in lost.values():
            assert found.names() == []
        else:
            assert found.files(NAME) == {FILE, SECOND, MANIFEST, SEAL}


def test_a_store_that_is_away_at_the_commit_does_not_hold_it_up(tmp_path: Path) -> None:
    paths = folders(tmp_path)
    draft = mirrored(paths, 1).create_draft(NAME, "a1")
    fill(draft)
    put_away(paths[0])
    draft.commit(drop=[PART])
    bring_back(paths[0])
    assert DirectoryStore(paths[0]).names() == []
    assert DirectoryStore(paths[1]).names() == [NAME]
    save(mirrored(paths, 1), OTHER)
    store = mirrored(paths, 1)
    assert store.names() == [NAME, OTHER]
    store.remove(NAME)
    assert store.names() == [OTHER]
    with pytest.raises(FileNotFoundError):
        store.remove(NAME)


def test_a_draft_that_is_not_created_yet_is_waited_for(tmp_path: Path) -> None:
    """Ranks poll: what was not there must be found once it is, and nothing is written before."""
    paths = folders(tmp_path)
    second = mirrored(paths).join_draft(NAME, "a1")
    for _ in range(4):
        with pytest.raises(OSError):
            second.read(PART)
        with pytest.raises(OSError):
            second.write(SECOND, [CONTENT])
    first = mirrored(paths).create_draft(NAME, "a1")
    assert second.read(PART) is None
    second.write(SECOND, [CONTENT])
    fill(first)
    first.commit(drop=[PART])
    assert all(DirectoryStore(path).files(NAME) >= {FILE, SECOND} for path in paths)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """The same checkpoint, as a run writes it, in two stores."""
    import torch

    from shoal.checkpoint.chunks import TensorRegion, lay_out_file
    from shoal.checkpoint.commit import commit_checkpoint, merge_tensors, write_chunks
    from shoal.checkpoint.dtypes import tensor_bytes
    from shoal.checkpoint.manifest import FORMAT, VERSION, Manifest, Origin, Progress
    from shoal.parallel.boxes import whole_box

    paths = folders(tmp_path)
    values = torch.arange(300, dtype=torch.float32)
    region = TensorRegion("model.w", "F32", (300,), whole_box((300,)))
    draft = mirrored(paths).create_draft(NAME, "a1")
    written = write_chunks(draft, 0, lay_out_file([region]), iter([[tensor_bytes(values)]]))
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        progress=Progress(step=20, samples=80, epoch=0, batch=20),
        origin=Origin("r", {}, "", 1, 4, {}),
        files=(written.file,),
        tensors=merge_tensors([written.tensors]),
        plain={},
    )
    commit_checkpoint(draft, manifest)
    return paths[0], paths[1]


@pytest.mark.parametrize("file", ["manifest.json", SEAL, "rank-00000.safetensors"])
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_copy_is_passed_over(trained: tuple[Path, Path], file: str, how: str) -> None:
    path = trained[0] / NAME / file
    content = bytearray(path.read_bytes())
    path.unlink()
    if how != "gone":
        content[-2] ^= 1
        path.write_bytes(content if how == "changed" else content[:-1])
    store = mirrored(list(trained))
    checkpoint = VerifiedCheckpoint(store, NAME)
    checkpoint.verify(2)
    ((tensor, chunk),) = checkpoint.manifest.chunks()
    assert bytes(checkpoint.read_chunk(tensor, chunk))[4:8] == b"\x00\x00\x80\x3f"
    other = trained[1] / NAME / file
    other.write_bytes(b"both are bad")
    with pytest.raises(BadCheckpoint):
        VerifiedCheckpoint(mirrored(list(trained)), NAME).verify()


def test_a_copy_catches_up(trained: tuple[Path, Path]) -> None:
    shutil.rmtree(trained[0] / NAME)
    source = open_store(f"mirror://1[{trained[0]},{trained[1]}]")
    with open_draft(new_target(trained[0] / NAME)) as draft:
        copy_checkpoint(VerifiedCheckpoint(source, NAME), draft)
    VerifiedCheckpoint(DirectoryStore(trained[0]), NAME).verify()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mirror:///a,/b", "is no mirror. Write"),
        ("mirror://[/a]", "is no mirror"),
        ("mirror://[/a,/b]x", "is no mirror"),
        ("mirror://3[/a,/b]", "'3' of 2 stores cannot be"),
        ("mirror://0[/a,/b]", "'0' of 2 stores cannot be"),
        ("mirror://[a,/b]", "'a' is neither an absolute path nor a URL"),
        ("mirror://[/a,/a]", "names a store twice"),
    ],
)
def test_wrong_mirrors_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_store(text)


def test_names_of_mirrors() -> None:
    assert parse_mirror("/a/b") is None
    found = parse_mirror("mirror://1[/a,s3://b/c]/run/checkpoints")
    assert found is not None
    assert found == (("/a/run/checkpoints", "s3://b/c/run/checkpoints"), 1)
    secret = "mirror://[s3://key:hunter2@b/x?sig=hunter2,/a]/y"
    assert redact_password(secret) == "mirror://[s3://b/x?sig=hunter2,/a]/y"
    assert "hunter2" not in redact_url(secret)
