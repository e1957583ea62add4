"""A fingerprint changes with what a source holds and a function does, and with nothing else."""

import functools
import importlib.util
import operator
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.data.sources import tensors, windows
from shoal.data.transforms import fingerprint, images
from shoal.data.transforms.fingerprint import NoIdentity, digest, identity_of
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.randomness import chain, on
from shoal.data.views import in_order, join


def module(tmp_path: Path, text: str, name: str = "rules") -> ModuleType:
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    exec(compile(path.read_text(), str(path), "exec"), made.__dict__)
    return made


FIRST = """
    import math
    LIMIT = 3
    def inner(x): return x + LIMIT
    def keep(x, least=2): return inner(x) > least and math.isfinite(x)
    class Box:
        def __init__(self, size): self.size = size
        def __call__(self, x): return x < self.size
    box = Box(3)
    def boxed(x): return box(x)
    def recursive(x): return recursive(x - 1) if x else inner(x)
"""


@pytest.mark.parametrize("name", ["keep", "boxed", "recursive", "box"])
def test_what_does_not_matter_does_not_show(tmp_path: Path, name: str) -> None:
    first = digest(getattr(module(tmp_path, FIRST), name))
    moved = "\n\n    # elsewhere\n    unused = 1\n" + FIRST
    assert digest(getattr(module(tmp_path, moved), name)) == first


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("keep", "LIMIT = 3", "LIMIT = 4"),
        ("keep", "x + LIMIT", "x - LIMIT"),
        ("keep", "least=2", "least=3"),
        ("keep", "> least", ">= least"),
        ("recursive", "x - 1", "x - 2"),
        ("recursive", "LIMIT = 3", "LIMIT = 4"),
        ("boxed", "Box(3)", "Box(4)"),
        ("boxed", "x < self", "x > self"),
    ],
)
def test_what_matters_does(tmp_path: Path, name: str, old: str, new: str) -> None:
    assert old in FIRST
    first, second = module(tmp_path, FIRST), module(tmp_path, FIRST.replace(old, new))
    assert digest(getattr(first, name)) != digest(getattr(second, name))


def test_a_file_that_is_called_like_a_module_of_python_is_ones_own(tmp_path: Path) -> None:
    texts = ["class Rule:\n    def f(self): return 1\n", "class Rule:\n    def f(self): return 2\n"]
    first, second = (module(tmp_path, text, "statistics").Rule for text in texts)
    assert digest(first) != digest(second) and digest(first()) != digest(second())
    assert digest(first.f) != digest(second.f)


def test_a_module_of_ones_own_is_looked_into(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        other = module(tmp_path, f"def f(x): return x + {number}", "other")
        made = module(tmp_path, "def g(x): return other.f(x)")
        made.__dict__["other"] = other
        found.append(digest(made.g))
    assert found[0] != found[1]


IMPORTING = [
    "def g(x):\n    from own.sub import f\n    return f(x)",
    "def g(x):\n    import own.sub\n    return own.sub.f(x)",
    "def g(x):\n    import own.sub as s\n    return s.f(x)",
    "def g(x):\n    from own import sub\n    return sub.f(x)",
    "import own.sub\ndef g(x): return own.sub.f(x)",
    "def make():\n    import own.sub as s\n    return lambda x: s.f(x)\ng = make()",
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes a package `own` with a module `sub`, to be imported anew."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def write(text: str) -> None:
        forget()
        (tmp_path / "own").mkdir(exist_ok=True)
        (tmp_path / "own" / "__init__.py").touch()
        (tmp_path / "own" / "sub.py").write_text(text)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield write
    forget()


@pytest.mark.parametrize("text", IMPORTING)
def test_what_a_function_imports_is_looked_into(
    text: str, tmp_path: Path, package: Callable[[str], None]
) -> None:
    found = []
    for number in (1, 2, 1):
        package(f"def f(x): return x + {number}")
        found.append(digest(module(tmp_path, text).g))
    assert found[0] == found[2] != found[1]


def test_imports_that_fail_and_modules_as_a_whole(
    tmp_path: Path, package: Callable[[str], None]
) -> None:
    package("raise ValueError('no')")
    importing = module(tmp_path, "def g(x):\n    import own.sub\n    return own.sub.f(x)").g
    with pytest.raises(NoIdentity, match=r"own\.sub cannot be imported: ValueError"):
        digest(importing)
    package("def f(x): return x")
    by_name = module(tmp_path, "import own.sub as s\ndef g(x, n): return getattr(s, n)(x)").g
    with pytest.raises(NoIdentity, match=r"what is used of the module own\.sub is not known"):
        digest(by_name)
    missing, other = "def g(x):\n    import nowhere_{}\n    import math\n    return x", []
    for name in "ab":
        other.append(digest(module(tmp_path, missing.format(name)).g))
    assert other[0] != other[1]


def test_all_of_a_class_counts(tmp_path: Path) -> None:
    text = """
        class Rule:
            least = 1
            @staticmethod
            def f(x): return x + 2
            @property
            def g(self): return self.least + 3
    """
    texts = [text, text.replace("1", "4"), text.replace("2", "5"), text.replace("3", "6")]
    found = [digest(module(tmp_path, one).Rule()) for one in texts]
    assert len(set(found)) == 4
    assert digest(module(tmp_path, "\n\n" + text).Rule()) == found[0]


def test_arrays_are_known_by_type_shape_and_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_CHUNK_BYTES", 64)
    tensor = torch.arange(60.0).view(12, 5)
    turned = tensor.t().contiguous().t()
    assert not turned.is_contiguous() and digest(turned) == digest(tensor)
    others = [tensor.view(5, 12), tensor.double(), tensor + 1, tensor.bfloat16(), tensor[:0]]
    others += [tensor.numpy(), tensor.numpy().reshape(5, 12), np.float32(0), np.zeros((), "f4")]
    assert len({digest(value) for value in [tensor, *others]}) == len(others) + 1
    assert digest(windows(torch.arange(99), 4).spans) == digest(torch.arange(99).unfold(0, 5, 4))
    with pytest.raises(NoIdentity, match="sparse"):
        digest(tensor.to_sparse())
    with pytest.raises(NoIdentity, match="array of object"):
        digest(np.array([object()]))


class Row(msgspec.Struct):
    a: int


def test_values_of_many_kinds() -> None:
    values: list[Any] = [
        *(1, 1.0, True, "1", b"1", None, (1,), [1], {"a": 1}, {1}, frozenset({2}), range(3)),
        *(np.int64(1), np.array([1]), torch.tensor([1]), np.float32, torch.float32, int, Row),
        *(len, str.strip, "x".join, np.isfinite, np.ndarray.sum, torch.relu, re.compile("a+")),
        *(operator.itemgetter(1), operator.itemgetter(2), operator.attrgetter("a"), int | None),
        *(list[int], functools.partial(int, base=2), functools.partial(int, base=3)),
        *(
            CHANGE,
            chain(images.flip),
            chain(images.jitter),
            on("a", abs),
            on("b", abs),
            lambda x: x,
        ),
    ]
    found = [digest(value) for value in values]
    assert len(set(found)) == len(values)
    assert found == [digest(value) for value in values]


def test_closures_and_equal_values() -> None:
    def adding(number: int) -> Any:
        return lambda value: value + number

    assert digest(adding(1)) == digest(adding(1)) != digest(adding(2))
    shared = (1, 2)
    assert digest(shared, shared) == digest((1, 2), tuple(range(1, 3)))


CHANGE = on("inputs", chain(images.flip, functools.partial(images.crop, padding=4)))


KEEP = """
import functools
def keep(x): return x in {"a", "b", "c"} and functools.reduce(max, x)
"""


@pytest.mark.full
def test_a_process_that_hashes_otherwise_finds_the_same() -> None:
    """Sets and objects lie elsewhere in another process, which must not show."""
    values = '(keep, {"b", "a", "c"}, on("inputs", functools.partial(images.crop, padding=4)))'
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[4] / "src")!r})
from shoal.data.transforms import images
from shoal.data.transforms.randomness import on
from shoal.data.transforms.fingerprint import digest
{KEEP}
print(digest({values}), end="")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = {"images": images, "on": on, "__name__": "__main__"}
    exec(KEEP, names)
    assert done.stdout == digest(eval(values, names))


def test_sources_are_known_by_what_they_hold() -> None:
    x, y = torch.randn(5, 2), torch.arange(5)
    named = tensors({"x": x}, y)
    others = [
        *(tensors(x, y), tensors(x + 1, y), tensors(x, y + 1), windows(torch.arange(20), 3)),
        *(windows(torch.arange(20), 4), [(1, 2)], [(1, 3)], [(1, 2), (1, 2)], named),
        *(mapped(named, abs), mapped(named, len), join([named, named])),
    ]
    found = [identity_of(source) for source in others]
    assert len(set(found)) == len(found)
    assert identity_of(in_order(named)) == identity_of(named)
    assert identity_of(tensors({"x": x.clone()}, y)) == identity_of(named)


class Named:
    def __init__(self, name: str):
        self.name = name

    def identity(self) -> str:
        return self.name


def test_a_source_that_names_itself_is_believed() -> None:
    assert identity_of(Named("a")) == "a"
    assert digest(Named("a")) == digest(Named("a")) != digest(Named("b"))


def test_what_cannot_be_told_apart_is_said() -> None:
    handle = (number for number in range(3))

    def reads(value: Any) -> Any:
        return value, next(handle)

    with pytest.raises(NoIdentity, match=r"reads refers to this: a .*generator"):
        digest(reads)
    with pytest.raises(NoIdentity, match=r"object does not say what it holds.*identity\(\)"):
        identity_of(object())
    with pytest.raises(NoIdentity, match="cannot be kept as bytes"):
        identity_of([(object(), 1)])
    nameless = torch.utils.data.TensorDataset(torch.ones(1))
    with pytest.raises(NoIdentity, match="TensorDataset does not say"):
        mapped(nameless, abs).identity()


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_library_is_known_by_version_wherever_it_is_installed(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pip install --user`, or in a venv that sees the system's packages."""
    place = tmp_path / "lib" / folder
    place.mkdir(parents=True)

    def digest_with(version: str, factor: int) -> str:
        text = f"__version__ = '{version}'\ndef scale(x): return {factor} * x\n"
        made = module(place, text, "installed")
        made.__file__ = str(place / "installed.py")
        monkeypatch.setitem(sys.modules, "installed", made)
        rules = module(tmp_path, "import installed\ndef change(x): return installed.scale(x)\n")
        return digest(rules.change)

    first = digest_with("1.0", 2)
    assert digest_with("1.0", 3) == first, "its code is not followed"
    assert digest_with("1.1", 3) != first
