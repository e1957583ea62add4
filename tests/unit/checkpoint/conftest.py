"""The verb, and places to give it."""

import json
from typing import Any

import fsspec.config
import pytest

from shoal.cli.main import run_here


class Said:
    """The exit code and words of `shoal checkpoint`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object):
        capsys.readouterr()
        self.code = run_here(["checkpoint", *map(str, words)])
        self.out, self.err = capsys.readouterr()

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def memory_url(memory: object) -> str:
    """An empty place, as a user would name it."""
    return "memory://urls"


@pytest.fixture
def s3_url(s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The same in S3; what the environment would say otherwise is fsspec's configuration here."""
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_options)
    return "s3://bucket/urls"
