"""S3 for tests: moto's server on loopback, behind a gate that can break connections.

Real requests over real sockets, through s3fs.
"""

import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import fsspec
import fsspec.asyn
import fsspec.config
import pytest

from shoal.cli.main import run_here
from shoal.testing.gates import Gate


class Said:
    """The exit code and words of `shoal checkpoint`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object):
        capsys.readouterr()
        self.code = run_here(["checkpoint", *map(str, words)])
        self.out, self.err = capsys.readouterr()

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, int]]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    threaded = pytest.importorskip("moto.server", reason="needs the extra test")
    # Its threads stay for good, and are not leaks of the test that happens to start them.
    threads = ThreadPoolExecutor(1)
    threads.submit(int).result()
    fsspec.asyn.get_loop().set_default_executor(threads)
    served = threaded.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    served.start()
    gc.freeze()  # what the session has made so far need not be looked through after every test
    yield served.get_host_and_port()
    served.stop()


@pytest.fixture(scope="session")
def gate(server: tuple[str, int]) -> Iterator[Gate]:
    made = Gate(server)
    yield made
    made.close()


@pytest.fixture(scope="session")
def session(server: object) -> Any:
    """What clients share: reading the description of S3 is most of the time they need to start."""
    return pytest.importorskip("aiobotocore.session").get_session()


@pytest.fixture
def options(gate: Gate, session: Any) -> Iterator[dict[str, Any]]:
    """What s3fs needs, for a bucket that is empty."""
    gate.num_resets, gate.num_bytes = 0, -1
    found = {
        "session": session,
        "endpoint_url": f"http://127.0.0.1:{gate.port}",
        "key": "nobody",
        "secret": "nothing",
        "client_kwargs": {"region_name": "eu-central-1"},
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    system = fsspec.filesystem("s3", use_listings_cache=False, **found)
    if not system.exists("bucket"):
        system.mkdir("bucket")
    yield found
    gate.num_resets = 0
    for path in system.find("bucket"):
        system.rm_file(path)
    gate.requests.clear()
    gc.collect()


@pytest.fixture
def memory_url() -> Iterator[str]:
    """An empty place, as a user would name it."""
    yield "memory://urls"
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/urls", recursive=True)


@pytest.fixture
def s3_url(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The same in S3; what the environment would say otherwise is fsspec's configuration here."""
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    return "s3://bucket/urls"


def environment_of(options: dict[str, Any]) -> dict[str, str]:
    """What tells s3fs where the server is."""
    return {
        "AWS_ENDPOINT_URL_S3": options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
    }
