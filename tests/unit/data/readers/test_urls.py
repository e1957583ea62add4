"""Readers on files behind URLs: in memory, and on S3 over real connections that may break.

S3 is moto's server on loopback (`tests/unit/conftest.py`).
"""

from typing import Any

import fsspec
import fsspec.asyn
import pytest

from shoal.data.readers.csv import csv
from shoal.data.readers.files import Files
from shoal.data.readers.linewise import jsonl, lines
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy, redact_password, redact_url
from shoal.testing.sources import Case, SourceConformance
from tests.support.gates import Gate

HASTY = RetryPolicy(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)
CONTENT = b'{"a": 1}\n{"a": 2}\n"three"\n'
EXPECTED = [{"a": 1}, {"a": 2}, "three"]


@pytest.fixture
def options(s3_options: dict[str, Any]) -> dict[str, Any]:
    """What s3fs needs, for a bucket with one file."""
    system = fsspec.filesystem("s3", use_listings_cache=False, **s3_options)
    system.pipe_file("bucket/in/a.jsonl", CONTENT)
    return s3_options


@pytest.mark.full
class TestS3(SourceConformance):
    @pytest.fixture
    def case(self, options: dict[str, Any]) -> Case:
        return Case(lambda: jsonl("s3://bucket/in/a.jsonl", options=options), EXPECTED)


@pytest.mark.full
def test_a_broken_connection_is_repeated_and_then_named(
    gate: Gate, options: dict[str, Any]
) -> None:
    files = Files("s3://bucket/in/a.jsonl", options, HASTY)
    gate.num_resets = 2
    assert files.read(0, 0, 8) == CONTENT[:8]
    gate.num_resets = 50
    with pytest.raises(SourceLost, match=r"cannot read s3://bucket/in/a.jsonl: .*tried 3 times"):
        files.read(0, 0, 8)
    gate.num_resets = 0
    assert files.read(0, 9, 18) == CONTENT[9:18]


@pytest.mark.full
def test_an_object_that_changed_or_vanished_is_lost(options: dict[str, Any]) -> None:
    """Also one of the same length, written within a second."""
    system = fsspec.filesystem("s3", use_listings_cache=False, **options)
    system.pipe_file("bucket/in/b.txt", b"one\ntwo\n")
    source = lines("s3://bucket/in/b.txt", options=options)
    assert source[1] == "two"
    system.pipe_file("bucket/in/b.txt", b"one\nTWO\n")
    with pytest.raises(SourceLost, match=r"s3://bucket/in/b.txt changed"):
        source[1]
    system.rm_file("bucket/in/b.txt")
    with pytest.raises(SourceLost, match=r"s3://bucket/in/b.txt cannot be opened any more"):
        source[0]
    with pytest.raises(UsageError, match=r"s3://bucket/in/b.txt does not exist"):
        lines("s3://bucket/in/b.txt", options=options)


@pytest.mark.full
def test_missing_credentials_are_named_at_once(
    gate: Gate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    without = {"endpoint_url": options["endpoint_url"], "anon": False}
    with pytest.raises(UsageError, match=r"cannot look at s3://bucket.*(?i:credentials)"):
        lines("s3://bucket/in/a.jsonl", options=without)


def test_local_and_remote_files_make_one_source(memory: Any, tmp_path: Any) -> None:
    memory.pipe_file("/shoal-urls/a.csv", b"a\n1\n2\n")
    (tmp_path / "b.csv").write_text("a\n3\n")
    source = csv(["memory://shoal-urls/a.csv", f"file://{tmp_path}/b.csv"])
    assert [row["a"] for row in source] == ["1", "2", "3"]
    memory.pipe_file("/shoal-urls/a.csv", b"a\n2\n1\n")
    with pytest.raises(SourceLost, match=r"memory://shoal-urls/a.csv changed"):
        source[0]
    assert source[2] == {"a": "3"}


def test_a_store_that_stops_answering_is_a_lost_source(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/shoal-urls/a.txt", b"one\n")
    files = Files("memory://shoal-urls/a.txt", patience=HASTY)

    def fail(*_: Any, **__: Any) -> bytes:
        raise ConnectionResetError("by the peer")

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(SourceLost, match=r"memory://shoal-urls/a.txt: by the peer.*3 times"):
        files.read(0, 0, 3)
    monkeypatch.setattr(type(memory), "info", fail)
    with pytest.raises(UsageError, match="cannot look at"):
        Files("memory://shoal-urls/a.txt", patience=HASTY)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p@ss@host:6379/0", "redis://host:6379/0"),
        ("s3://key:secret@bucket/a@b", "s3://bucket/a@b"),
        ("redis://:pa/ss@host:6379/0", "redis://host:6379/0"),
        ("https://me:pa/s@s/@host/x", "https://host/x"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://[::1]:80/a@b", "https://[::1]:80/a@b"),
        ("memory://a/b@c", "memory://a/b@c"),
        ("/data//me@home/a", "/data//me@home/a"),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, shown: str) -> None:
    assert redact_password(url) == shown


def test_a_signature_is_not_shown(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://shoal-urls/a.txt?X-Amz-Signature=f00"
    memory.pipe_file("/shoal-urls/a.txt?X-Amz-Signature=f00", b"one\n")
    files = Files(url, patience=HASTY)
    assert files.names == ["memory://shoal-urls/a.txt?..."]
    assert redact_url("/data/what?.csv") == "/data/what?.csv"
    other = url.replace("f00", "f11")
    memory.pipe_file("/shoal-urls/a.txt?X-Amz-Signature=f11", b"one\n")
    assert Files(other).identity("x") != files.identity("x")

    def fail(*_: Any, **__: Any) -> bytes:
        raise ConnectionResetError(f"by the peer, url='https://me:hunter2@host/{url}'")

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(SourceLost, match="by the peer, url='https://host/") as lost:
        files.read(0, 0, 3)
    memory.rm_file("/shoal-urls/a.txt?X-Amz-Signature=f00")
    with pytest.raises(UsageError, match="does not exist") as missing:
        Files(url)
    monkeypatch.undo()
    with pytest.raises(SourceLost) as gone:
        files.read(0, 0, 3)
    said = f"{lost.value} {missing.value} {gone.value}"
    assert "f00" not in said and "hunter2" not in said


def test_a_chain_of_urls_is_refused_without_its_secrets() -> None:
    with pytest.raises(UsageError, match="is a chain of URLs") as refused:
        Files("zip://a@b::https://me:hunter2@host/x.zip")
    assert "hunter2" not in str(refused.value)


def test_addresses_that_nothing_opens_are_refused(memory: Any) -> None:
    memory.pipe_file("/shoal-urls/x/a.csv", b"a\n")
    with pytest.raises(UsageError, match="nosuch:// is no store"):
        lines("nosuch://a/b")
    with pytest.raises(UsageError, match=r"memory://shoal-urls/x is a directory"):
        lines("memory://shoal-urls/x")
    with pytest.raises(UsageError, match=r"memory://shoal-urls/b does not exist"):
        lines("memory://shoal-urls/b")
