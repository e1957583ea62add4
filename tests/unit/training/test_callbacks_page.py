"""What docs/how-to/callbacks.md shows works as it stands there."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import shoal

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "callbacks.md"


def examples(num_blocks: int) -> dict[str, Any]:
    """The names that the first blocks leave."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks[:num_blocks]:
        exec(block, names)
    return names


def test_the_callbacks_run() -> None:
    names = examples(2)
    run = names["small"](steps=40)
    run = dataclasses.replace(run, callbacks=[*run.callbacks, names["Gap"]()])
    with shoal.trainer(run) as trainer:
        infos = list(trainer)
    assert [info.step for info in infos if "gap" in info.logged] == [16, 32, 40]
    assert infos[9].logged.keys() == {"weight"} and "ema_loss" in (infos[15].evaluation or {})


@pytest.mark.full
def test_the_average_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = examples(3)
    outcome, model = names["outcome"], names["model"]
    assert outcome.steps == 60 and "ema_loss" in outcome.metrics
    trained = dict(outcome.model().named_parameters())
    assert all(p.ne(trained[name]).any() for name, p in model.named_parameters())
