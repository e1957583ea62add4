"""What samples are kept under: the same for the same samples, another when data or code change."""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.cache.cached import cached
from shoal.data.cache.keys import name_samples
from shoal.data.readers.columns import ColumnPairs
from shoal.data.readers.images import images
from shoal.data.sources import tensors
from shoal.data.transforms.cleaning import clean
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.normalizing import normalized
from shoal.data.transforms.statistics import statistics
from shoal.data.views import in_order
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
    plain = name_samples(load()["Photos"](8), "a")
    assert name_samples(load()["Photos"](8), "a") == plain
    assert name_samples(load()["Photos"](8), "b") != plain
    assert name_samples(load()["Photos"](9), "a") != plain
    assert name_samples(load(factor=3)["Photos"](8), "a") != plain
    assert name_samples(load(scale=3)["Photos"](8), "a") != plain


def test_comments_lines_and_paths_do_not_count(load: Load) -> None:
    plain = name_samples(load()["Photos"](8), "a")
    other = load(head="# moved\n\n\n", comment="# of no matter")
    assert name_samples(other["Photos"](8, path="/elsewhere"), "a") == plain


def test_what_is_wrapped_counts(load: Load) -> None:
    def named(function: Callable[[int], int], **changes: object) -> str:
        module = load(**changes)
        return name_samples(module["Outer"](module["Photos"](8), function), "a")

    assert named(lambda x: x + 1) == named(lambda x: x + 1)
    assert named(lambda x: x + 1) != named(lambda x: x + 2)
    assert named(lambda x: x + 1) != named(lambda x: x + 1, factor=3)


def test_code_that_holds_what_cannot_be_told_counts_by_itself(load: Load) -> None:
    lock = object()

    def first(x: int) -> tuple[int, object]:
        return x + 1, lock

    def second(x: int) -> tuple[int, object]:
        return x + 2, lock

    names = {name_samples(load()["Outer"]([1], function), "a") for function in (first, second)}
    assert len(names) == 2


class Scale:
    """A function that is an object, with a setting, and maybe what has no content to compare."""

    def __init__(self, by: int, lock: object = None):
        self.by, self.lock = by, lock

    def __call__(self, value: int) -> int:
        return value * self.by


def scale(value: int, by: int) -> int:
    return value * by


class Table:
    """Columns of numbers, of which nothing is told."""

    columns = ("a/1", "a/2", "y")

    def __len__(self) -> int:
        return 3

    def __str__(self) -> str:
        return "the table"

    def identity(self) -> str:
        return "table"

    def arrays(self, ids: Any, names: Any) -> dict[str, Any]:
        return {name: np.zeros(len(ids)) for name in names}

    def unfit(self, name: str) -> None:
        return None


PAIRS = tensors(torch.arange(8.0).reshape(4, 2), torch.arange(4))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], [1, 3]),
        ({"a": 1}, {"a": 2}),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}),
        (torch.zeros(2), torch.ones(2)),
        (np.zeros(2), np.zeros(3)),
        (functools.partial(scale, by=2), functools.partial(scale, by=3)),
        (Scale(2), Scale(3)),
        (Scale(2).__call__, Scale(3).__call__),
        ("1/2", "1/3"),
        (b"a", b"b"),
        (mapped([1], functools.partial(scale, by=2)), mapped([1], functools.partial(scale, by=3))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_two_settings_under_one_key_have_two_names(load: Load, first: Any, second: Any) -> None:
    def named(value: Any) -> str:
        return name_samples(load()["Photos"](value), "a")

    assert named(first) == named(first)
    assert named(first) != named(second)


def test_settings_of_layers_and_readers_count_under_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL", reason="needs the extra images")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "found"))
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    measured = statistics(PAIRS, ["inputs", "target"])
    table: Any = Table()
    sources = [
        mapped([1, 2], Scale(2)),
        mapped([1, 2], Scale(3)),
        clean(PAIRS, keep=lambda pair: pair[1] > 1),
        clean(PAIRS, keep=lambda pair: pair[1] > 2),
        normalized(PAIRS, statistics=measured),
        normalized(PAIRS, statistics=statistics(PAIRS, {"inputs": 0, "target": None})),
        normalized(PAIRS, ["inputs"], measured),
        normalized(PAIRS, ["target"], measured),
        images(tmp_path / "photos"),
        images(tmp_path / "photos", mode="L"),
        images(tmp_path / "photos", most_pixels=10),
        ColumnPairs(table, "a/1", "y"),
        ColumnPairs(table, "a/2", "y"),
        ColumnPairs(table, ["a/1", "a/2"], "y"),
    ]
    names = [name_samples(source, "a") for source in sources]
    assert len(set(names)) == len(names)
    assert names == [name_samples(source, "a") for source in sources]


def test_an_object_that_cannot_be_compared_counts_by_its_code() -> None:
    held = [Scale(2, threading.Lock()), functools.partial(scale, by=threading.Lock())]
    names = [name_samples(mapped([1], function), "a") for function in held]
    assert names == [name_samples(mapped([1], function), "a") for function in held]
    assert len(set(names)) == 2


def test_how_samples_are_asked_for_does_not_count(tmp_path: Path) -> None:
    """Nor where they lie, nor how many were made before."""

    def named(where: str) -> str:
        (tmp_path / where / "cat").mkdir(parents=True)
        return name_samples(in_order(mapped(images(tmp_path / where), Scale(2))), "a")

    pytest.importorskip("PIL", reason="needs the extra images")
    assert named("here") == named("there")
    kept = cached(PAIRS, memory=None, disk=tmp_path / "kept")
    before = name_samples(kept, "a")
    assert kept[0] and kept.num_made == 1
    assert name_samples(kept, "a") == before
    kept.close()


def test_a_source_that_tells_needs_no_key(load: Load) -> None:
    told = load()["Told"](8)
    assert "told" in name_samples(told, None)
    assert name_samples(told, None) == name_samples(load()["Told"](8), None)
    assert name_samples(told, "a") != name_samples(told, None)


def test_data_in_memory_is_known_by_its_bytes() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    first, same = tensors(rows, rows[:, 0]), tensors(rows.clone(), rows[:, 0].clone())
    assert name_samples(first, None) == name_samples(same, None)
    assert name_samples(first, None) != name_samples(tensors(rows + 1, rows[:, 0]), None)
    assert name_samples([(1, 2)], None) != name_samples([(1, 3)], None)


def test_a_source_that_cannot_tell_is_refused_with_the_way_out(load: Load) -> None:
    with pytest.raises(UsageError, match=r"cached\(source, key="):
        name_samples(load()["Photos"](8), None)


def test_a_key_is_a_text() -> None:
    wrong: list[Any] = ["", 7, b"a"]
    for key in wrong:
        with pytest.raises(UsageError, match="the key is a text"):
            name_samples([1], key)


WITH_SETS = """
kinds = frozenset({"a", "b", "c", "d"})
def chosen(x):
    return x in {"p", "q", "r", "s"} or x in kinds
from shoal.data.cache.keys import name_samples
found = name_samples(Outer(Photos(8), chosen), "a")
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
