"""Tar files: samples by stem, read in place; hostile and damaged ones are refused by name."""

import gzip
import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.readers import tar as tar_module
from shoal.data.readers.records import SourceLost
from shoal.data.readers.tar import tar
from shoal.errors import ShoalError, UsageError
from shoal.testing.sources import Case, SourceConformance

CONTENT = {
    "./a/0001.jpg": b"first image" * 60,
    "./a/0001.cls": b"3",
    "a/0002.seg.PNG": b"",
    "b/0001.jpg": b"x" * 512,
    "a/0001.txt": b"late",
    "README": b"no ending",
    ".hidden": b"no stem",
}
EXPECTED = [
    {"__key__": "a/0001", "jpg": b"first image" * 60, "cls": b"3", "txt": b"late"},
    {"__key__": "a/0002", "seg.png": b""},
    {"__key__": "b/0001", "jpg": b"x" * 512},
]


def archive(content: dict[str, bytes], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as file:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        file.addfile(folder)
        for name, part in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(part)
            file.addfile(member, io.BytesIO(part))
    return buffer.getvalue()


def single(kind: int = tarfile.GNU_FORMAT, **fields: Any) -> bytes:
    """An archive of one member with a header of one's own."""
    member = tarfile.TarInfo("evil.txt")
    for name, value in fields.items():
        setattr(member, name, value)
    body = b"x" * 600
    member.size = fields.get("size", len(body))
    header = member.tobuf(kind)
    return header + body + b"\0" * (424 + 1024)


def with_hole(content: bytes, at: int) -> bytes:
    """As a disk leaves it that lost a block when the power went."""
    return content[:at] + bytes(512) + content[at + 512 :]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


class TestTar(SourceConformance):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        first = written(tmp_path / "1.tar", archive(CONTENT))
        second = written(tmp_path / "2.tar", archive({"c.json": b"{}"}, tarfile.PAX_FORMAT))
        expected = [*EXPECTED, {"__key__": "c", "json": b"{}"}]
        return Case(lambda: tar([first, second]), expected)


@pytest.mark.full
class TestTarBehindAUrl(SourceConformance):
    @pytest.fixture
    def case(self, memory: Any) -> Case:
        memory.pipe_file("/shoal-tar/a.tar", archive(CONTENT))
        return Case(lambda: tar("memory://shoal-tar/a.tar"), EXPECTED)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_names_is_read(
    tmp_path: Path, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_module, "_WINDOW_BYTES", 700)  # many windows
    folder = "/".join(["f" * 60] * (2 if kind == tarfile.USTAR_FORMAT else 9))
    content = {f"{folder}/{number:03}.bin": bytes([number]) * number for number in range(200)}
    if kind != tarfile.USTAR_FORMAT:
        content["naïve.txt"] = b"1"
    source = tar(written(tmp_path / "a.tar", archive(content, kind)))
    found = [(sample["__key__"], sample) for sample in source]
    assert [key for key, _ in found] == [name.partition(".")[0] for name in content]
    assert [next(iter(list(s.values())[1:])) for _, s in found] == list(content.values())


HOSTILE = {
    "absolute": (single(name="/etc/passwd.txt"), "points out of the archive"),
    "above": (single(name="a/../../x.txt"), "points out of the archive"),
    "link": (single(type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link"),
    "hard link": (single(type=tarfile.LNKTYPE, linkname="a"), "a link"),
    "device": (single(type=tarfile.CHRTYPE), "a device"),
    "block": (single(type=tarfile.BLKTYPE), "a device"),
    "pipe": (single(type=tarfile.FIFOTYPE), "a pipe"),
    "sparse": (single(type=tarfile.GNUTYPE_SPARSE), "a sparse file"),
    "unknown": (single(type=b"Q"), "of the unknown type"),
    "huge": (single(size=1 << 40), "1,099,511,627,776 bytes, and 268,435,456 are allowed"),
    "cut": (single(size=200_000), "does not fit into the file"),
    "negative": (single(size=-1), "does not fit into the file"),
    "sparse by pax": (
        single(kind=tarfile.PAX_FORMAT, pax_headers={"GNU.sparse.size": "9999999999"}),
        "a sparse file",
    ),
    "size by pax": (
        single(kind=tarfile.PAX_FORMAT, pax_headers={"size": "-5"}),
        "'-5' is no number",
    ),
    "path by pax": (
        single(kind=tarfile.PAX_FORMAT, pax_headers={"path": "../x.txt"}),
        "points out of the archive",
    ),
    "long name": (single(type=tarfile.GNUTYPE_LONGNAME, size=1 << 30), "a header of"),
    "pax": (single(type=tarfile.XHDTYPE), "a pax header cannot be read"),
    "global": (single(type=tarfile.XGLTYPE), "a pax header cannot be read"),
    "text": (b"this is no archive " * 60, "no tar header"),
    "empty": (b"", "it was cut"),
    "end": (archive(CONTENT)[:3584], "it was cut"),
    "two in one": (archive(CONTENT) + archive({"late.txt": b"1"}), "and more follows"),
    "hole": (with_hole(archive(CONTENT), 512), "and more follows"),
}


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    for content, said in HOSTILE.values():
        with pytest.raises(UsageError, match=rf"(?s)a.tar, at byte \d+: .*{said}"):
            tar(written(tmp_path / "a.tar", content))
        assert os.listdir(tmp_path) == ["a.tar"]


def test_the_standard_library_says_nothing(tmp_path: Path) -> None:
    """Why there is a reader of ours: samples would be lost, or come from elsewhere, unsaid."""
    for name in ("above", "link", "device", "end", "two in one", "hole"):
        with tarfile.open(fileobj=io.BytesIO(HOSTILE[name][0])) as opened:
            assert len(opened.getmembers()) < 9, name
    damaged = archive({"ü" * 60 + ".txt": b"1"}, tarfile.PAX_FORMAT)
    at = damaged.index(b" path=")
    damaged = damaged[: at - 1] + b"x" + damaged[at:]
    with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(damaged)) as opened:
        assert opened.getnames()[-1] == "?" * 60 + ".txt"  # newer ones fail
    with pytest.raises(UsageError, match="a pax header cannot be read"):
        tar(written(tmp_path / "a.tar", damaged))


def test_a_global_header_with_a_comment_is_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "abc"}
    ) as file:
        file.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    assert list(tar(written(tmp_path / "a.tar", buffer.getvalue()))) == [
        {"__key__": "a", "txt": b""}
    ]


def test_compressed_archives_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a.tar.gz is compressed by gzip.* Unpack the file once"):
        tar(written(tmp_path / "a.tar.gz", gzip.compress(archive(CONTENT))))


def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    content = archive({"a.txt": b"1", "./a.TXT": b"2"})
    with pytest.raises(UsageError, match=r"holds a.TXT twice"):
        tar(written(tmp_path / "a.tar", content))


def test_empty_and_single(tmp_path: Path) -> None:
    assert len(tar(written(tmp_path / "a.tar", archive({})))) == 0
    assert list(tar(written(tmp_path / "b.tar", archive({"x.y": b"z"})))) == [
        {"__key__": "x", "y": b"z"}
    ]


def test_a_changed_archive_is_lost(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", archive(CONTENT))
    source = tar(path)
    path.write_bytes(archive({**CONTENT, "./a/0001.cls": b"4"}))
    os.utime(path, ns=(0, 0))
    with pytest.raises(SourceLost, match=r"a.tar changed"):
        source[0]
    path.write_bytes(archive(CONTENT)[:2000])
    with pytest.raises(SourceLost, match=r"a.tar changed"):
        source[0]


WHOLE = archive({"a.txt": b"abc" * 300, "n" * 120 + ".txt": b"x"}, tarfile.GNU_FORMAT)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_any_damaged_byte_of_a_header_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, change: int
) -> None:
    """Each ends in samples or in one of our errors, and soon."""
    content = bytearray(WHOLE)
    content[at] ^= change
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    try:
        source = tar(written(path, bytes(content)))
    except ShoalError:
        return
    assert all(sample["__key__"] for sample in source)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    for length in [*range(0, len(WHOLE.rstrip(b"\0")), 97), 511, 512, 1024]:
        with pytest.raises(UsageError):
            tar(written(tmp_path / "a.tar", WHOLE[:length]))
