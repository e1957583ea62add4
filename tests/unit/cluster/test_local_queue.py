"""The local queue passes the tests of every engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cluster.local_queue.engine import LocalQueue
from shoal.cluster.local_queue.protocol import SOCKET, queue_directory
from shoal.testing.engines import EngineConformance
from tests.support.leaks import wait_until

TINY = Path(__file__).parents[2] / "faults" / "tiny.py"


@pytest.mark.full
@pytest.mark.timeout(300)
class TestLocalQueue(EngineConformance):
    """On this machine, with an agent that ends with the last job."""

    recipe = f"{TINY}:mlp"

    @pytest.fixture
    def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalQueue]:
        monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path / "state"))
        yield LocalQueue()
        assert wait_until(lambda: not (queue_directory() / SOCKET).exists(), 20.0)
