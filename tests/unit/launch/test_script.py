"""`shoal.trainer` in a script: what it leaves behind if it fails."""

import dataclasses
import signal
from pathlib import Path

import pytest
from torch import nn

import shoal
from tests.system import tiny


def test_a_trainer_that_cannot_be_made_gives_sigterm_back(tmp_path: Path) -> None:
    def broken() -> nn.Module:
        raise KeyError("of the model")

    run = dataclasses.replace(tiny.line(), model=broken)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyError, match="of the model"):
            shoal.trainer(run, checkpoints=tmp_path / "checkpoints")
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
