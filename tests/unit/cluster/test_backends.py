"""The back end of one machine keeps what back ends promise."""

import pytest

from shoal.cluster.backend import Backend
from shoal.cluster.local import LocalBackend
from shoal.testing.backends import BackendConformance


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return LocalBackend()
