"""Users' type checkers see the package: `py.typed`, and every lazy name under TYPE_CHECKING."""

import ast
import importlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

LAZY = {"shoal": "src/shoal/__init__.py", "shoal.data": "src/shoal/data/__init__.py"}

USER = """
import torch
from torch import nn
import shoal

def small(width: int = 8) -> shoal.Run:
    return shoal.Run(
        model=lambda: nn.Linear(width, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        schedule=shoal.schedules.cosine(warmup=2),
        data=shoal.data.tensors(torch.zeros(8, width), torch.zeros(8, 1)),
        batch_size=4,
        steps=2,
    )

"""


def declared(path: Path) -> set[str]:
    """The names that a module imports for type checkers."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                for alias in statement.names:
                    assert alias.asname == alias.name, "only `as` itself is passed on"
                    found.add(alias.name)
    return found


@pytest.mark.parametrize("module", LAZY)
def test_every_lazy_name_is_declared_where_it_is(root: Path, module: str) -> None:
    loaded = importlib.import_module(module)
    lazy = set(loaded.__all__) if module == "shoal" else set(dir(loaded))
    assert declared(root / LAZY[module]) == lazy
    for name in lazy:
        assert getattr(loaded, name) is not None


def test_the_package_says_that_it_has_types(root: Path) -> None:
    assert (root / "src" / "shoal" / "py.typed").exists()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_users_type_checker_sees_every_name(root: Path, tmp_path: Path) -> None:
    """As installed, in an environment of its own; a name that is misspelt is an error."""
    pytest.importorskip("mypy", reason="needs the extra lint")
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "shoal").symlink_to(root / "src" / "shoal")
    names = [
        f"{module}.{name}"
        for module in LAZY
        for name in sorted(declared(root / LAZY[module]))
        if f"{module}.{name}" not in ("shoal.data", "shoal.schedules")
    ]
    (tmp_path / "user.py").write_text(USER + "".join(f"reveal_type({name})\n" for name in names))
    (tmp_path / "wrong.py").write_text("import shoal\nshoal.Rnu\nshoal.data.tensor\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable"]
    command += [str(place / "bin" / "python"), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "user.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True, timeout=800
    )
    told = done.stdout.splitlines()
    revealed = [line for line in told if "Revealed type" in line]
    assert len(revealed) == len(names), done.stdout
    assert not [line for line in revealed if '"Any"' in line], done.stdout
    errors = [line for line in told if "error:" in line]
    assert [line.partition(":")[0] for line in errors] == ["wrong.py", "wrong.py"], done.stdout
    assert all("has no attribute" in line for line in errors)
