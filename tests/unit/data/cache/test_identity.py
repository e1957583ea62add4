"""What samples are kept under: the same for the same samples, another when data or code change."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data.cache.identity import name_content
from shoal.data.sources import tensors
from shoal.errors import UsageError

MODULE = """
{head}

SCALE = {scale}

def helper(value):
    return value * {factor}

class Photos:
    def __init__(self, size, path="/somewhere"):
        self.size, self.path, self._private = size, path, object()
    def __len__(self):
        return 3
    def __getitem__(self, index):
        {comment}
        return helper(index) + SCALE + self.size

class Told(Photos):
    def identity(self):
        return "told"

class Outer:
    def __init__(self, source, function):
        self.source, self.function = source, function
    def __len__(self):
        return len(self.source)
    def __getitem__(self, index):
        return self.function(self.source[index])
"""

Load = Callable[..., dict[str, Any]]


@pytest.fixture
def load() -> Load:
    """The module as it would be after an edit."""

    def edited(**changes: object) -> dict[str, Any]:
        parts = {"head": "", "scale": 1, "factor": 2, "comment": "", **changes}
        made: dict[str, Any] = {"__name__": "of_the_user"}
        exec(compile(MODULE.format(**parts), "of_the_user.py", "exec"), made)
        return made

    return edited


def test_the_key_and_the_code_count(load: Load) -> None:
    plain = name_content(load()["Photos"](8), "a")
    assert name_content(load()["Photos"](8), "a") == plain
    assert name_content(load()["Photos"](8), "b") != plain
    assert name_content(load()["Photos"](9), "a") != plain
    assert name_content(load(factor=3)["Photos"](8), "a") != plain
    assert name_content(load(scale=3)["Photos"](8), "a") != plain


def test_comments_lines_and_paths_do_not_count(load: Load) -> None:
    plain = name_content(load()["Photos"](8), "a")
    other = load(head="# moved\n\n\n", comment="# of no matter")
    assert name_content(other["Photos"](8, path="/elsewhere"), "a") == plain


def test_what_is_wrapped_counts(load: Load) -> None:
    def named(function: Callable[[int], int], **changes: object) -> str:
        module = load(**changes)
        return name_content(module["Outer"](module["Photos"](8), function), "a")

    assert named(lambda x: x + 1) == named(lambda x: x + 1)
    assert named(lambda x: x + 1) != named(lambda x: x + 2)
    assert named(lambda x: x + 1) != named(lambda x: x + 1, factor=3)


def test_code_that_holds_what_cannot_be_told_counts_by_itself(load: Load) -> None:
    lock = object()

    def first(x: int) -> tuple[int, object]:
        return x + 1, lock

    def second(x: int) -> tuple[int, object]:
        return x + 2, lock

    names = {name_content(load()["Outer"]([1], function), "a") for function in (first, second)}
    assert len(names) == 2


def test_a_source_that_tells_needs_no_key(load: Load) -> None:
    told = load()["Told"](8)
    assert "told" in name_content(told, None)
    assert name_content(told, None) == name_content(load()["Told"](8), None)
    assert name_content(told, "a") != name_content(told, None)


def test_data_in_memory_is_known_by_its_bytes() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    first, same = tensors(rows, rows[:, 0]), tensors(rows.clone(), rows[:, 0].clone())
    assert name_content(first, None) == name_content(same, None)
    assert name_content(first, None) != name_content(tensors(rows + 1, rows[:, 0]), None)
    assert name_content([(1, 2)], None) != name_content([(1, 3)], None)


def test_a_source_that_cannot_tell_is_refused_with_the_way_out(load: Load) -> None:
    with pytest.raises(UsageError, match=r"cached\(source, key="):
        name_content(load()["Photos"](8), None)


def test_a_key_is_a_text() -> None:
    wrong: list[Any] = ["", 7, b"a"]
    for key in wrong:
        with pytest.raises(UsageError, match="the key is a text"):
            name_content([1], key)


WITH_SETS = """
kinds = frozenset({"a", "b", "c", "d"})
def chosen(x):
    return x in {"p", "q", "r", "s"} or x in kinds
from shoal.data.cache.identity import name_content
found = name_content(Outer(Photos(8), chosen), "a")
"""


@pytest.mark.full
def test_every_process_finds_the_same_name(tmp_path: Path) -> None:
    """Sets are ordered by hashes, which differ from process to process."""
    code = MODULE.format(head="", scale=1, factor=2, comment="") + WITH_SETS
    here: dict[str, Any] = {"__name__": "of_the_user"}
    exec(code, here)
    script = tmp_path / "script.py"
    script.write_text(f"made = {{'__name__': 'of_the_user'}}\nexec({code!r}, made)\n")
    with script.open("a") as file:
        file.write("print(made['found'])\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == here["found"]
