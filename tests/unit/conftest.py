"""Stores that checkpoints and data are kept in: one in memory, and S3.

S3 is moto's server on loopback, behind a gate that can break connections: real requests over real
sockets, through s3fs.
"""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import fsspec.asyn
import pytest

from tests.support.gates import Gate


@pytest.fixture
def memory() -> Iterator[Any]:
    """The store at memory://, empty before and after."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
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
def gate(s3_server: tuple[str, int]) -> Iterator[Gate]:
    made = Gate(s3_server)
    yield made
    made.close()


@pytest.fixture(scope="session")
def s3_session(s3_server: object) -> Any:
    """What clients share: reading the description of S3 is most of the time they need to start."""
    return pytest.importorskip("aiobotocore.session").get_session()


@pytest.fixture
def s3_options(gate: Gate, s3_session: Any) -> Iterator[dict[str, Any]]:
    """What s3fs needs, for s3://bucket, which is empty."""
    gate.num_resets, gate.num_bytes = 0, -1
    found = {
        "session": s3_session,
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
    gc.collect()  # clients of s3fs are closed by the collector


@pytest.fixture
def s3_environment(s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The same, as a user tells s3fs of it."""
    found = {
        "AWS_ENDPOINT_URL_S3": s3_options["endpoint_url"],
        "AWS_ACCESS_KEY_ID": s3_options["key"],
        "AWS_SECRET_ACCESS_KEY": s3_options["secret"],
        "AWS_DEFAULT_REGION": s3_options["client_kwargs"]["region_name"],
        "AWS_MAX_ATTEMPTS": "1",  # we insist, not the back end
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found
