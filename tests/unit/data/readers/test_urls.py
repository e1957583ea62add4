"""Readers on files behind URLs: in memory, and on S3 over real connections that may break.

S3 is moto's server on loopback behind a gate, through s3fs.
"""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import fsspec
import fsspec.asyn
import pytest

from shoal.checkpoint.remote import Patience, without_password
from shoal.data.readers.csv import csv
from shoal.data.readers.files import Files
from shoal.data.readers.linewise import jsonl, lines
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.testing.gates import Gate
from shoal.testing.sources import Case, SourceConformance

HASTY = Patience(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)
CONTENT = b'{"a": 1}\n{"a": 2}\n"three"\n'
EXPECTED = [{"a": 1}, {"a": 2}, "three"]


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    with suppress(FileNotFoundError):
        system.rm("/shoal-urls", recursive=True)


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    server = pytest.importorskip("moto.server", reason="needs the extra test")
    # Its threads stay for good, and are not leaks of the test that happens to start them.
    threads = ThreadPoolExecutor(1)
    threads.submit(int).result()
    fsspec.asyn.get_loop().set_default_executor(threads)
    served = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    served.start()
    made = Gate(served.get_host_and_port())
    yield made
    made.close()
    served.stop()


@pytest.fixture
def options(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield settings
    gc.collect()  # clients of s3fs are closed by the collector


@pytest.fixture(scope="module")
def settings(gate: Gate) -> dict[str, Any]:
    """What s3fs needs, for a bucket with one file."""
    found = {
        "session": pytest.importorskip("aiobotocore.session").get_session(),
        "endpoint_url": f"http://127.0.0.1:{gate.port}",
        "key": "nobody",
        "secret": "nothing",
        "client_kwargs": {"region_name": "eu-central-1"},
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    system = fsspec.filesystem("s3", use_listings_cache=False, **found)
    system.mkdir("readers")
    system.pipe_file("readers/in/a.jsonl", CONTENT)
    return found


@pytest.mark.full
class TestS3(SourceConformance):
    @pytest.fixture
    def case(self, options: dict[str, Any]) -> Case:
        return Case(lambda: jsonl("s3://readers/in/a.jsonl", options=options), EXPECTED)


@pytest.mark.full
def test_a_broken_connection_is_repeated_and_then_named(
    gate: Gate, options: dict[str, Any]
) -> None:
    files = Files("s3://readers/in/a.jsonl", options, HASTY)
    gate.num_resets = 2
    assert files.read(0, 0, 8) == CONTENT[:8]
    gate.num_resets = 50
    with pytest.raises(SourceLost, match=r"cannot read s3://readers/in/a.jsonl: .*tried 3 times"):
        files.read(0, 0, 8)
    gate.num_resets = 0
    assert files.read(0, 9, 18) == CONTENT[9:18]


@pytest.mark.full
def test_an_object_that_changed_or_vanished_is_lost(options: dict[str, Any]) -> None:
    """Also one of the same length, written within a second."""
    system = fsspec.filesystem("s3", use_listings_cache=False, **options)
    system.pipe_file("readers/in/b.txt", b"one\ntwo\n")
    source = lines("s3://readers/in/b.txt", options=options)
    assert source[1] == "two"
    system.pipe_file("readers/in/b.txt", b"one\nTWO\n")
    with pytest.raises(SourceLost, match=r"s3://readers/in/b.txt changed"):
        source[1]
    system.rm_file("readers/in/b.txt")
    with pytest.raises(SourceLost, match=r"s3://readers/in/b.txt cannot be opened any more"):
        source[0]
    with pytest.raises(UsageError, match=r"s3://readers/in/b.txt does not exist"):
        lines("s3://readers/in/b.txt", options=options)


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
    with pytest.raises(UsageError, match=r"cannot look at s3://readers.*(?i:credentials)"):
        lines("s3://readers/in/a.jsonl", options=without)


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
        ("memory://a/b@c", "memory://a/b@c"),
        ("/data//me@home/a", "/data//me@home/a"),
    ],
)
def test_no_part_of_a_password_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_addresses_that_nothing_opens_are_refused(memory: Any) -> None:
    memory.pipe_file("/shoal-urls/x/a.csv", b"a\n")
    with pytest.raises(UsageError, match="nosuch:// is no store"):
        lines("nosuch://a/b")
    with pytest.raises(UsageError, match=r"memory://shoal-urls/x is a directory"):
        lines("memory://shoal-urls/x")
    with pytest.raises(UsageError, match=r"memory://shoal-urls/b does not exist"):
        lines("memory://shoal-urls/b")
