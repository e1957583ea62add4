"""`import shoal` is nearly free: names load when used, so a command line answers at once."""

import ast
import subprocess
import sys
from pathlib import Path

MOST_MS = 50
# May hold names that load lazily, so that `shoal.data.windows` works.
WITH_NAMES = {
    "src/shoal/__init__.py",
    "src/shoal/data/__init__.py",
    "src/shoal/slim/__init__.py",
}

# Processor time, not the clock on the wall: other work on the machine must not fail this.
MEASURE = """
import time
start = time.process_time()
import shoal
print(1000 * (time.process_time() - start))
"""

LIST = "import shoal, sys; print(*sorted(sys.modules))"


def run(code: str, root: Path) -> str:
    # From the sources, whether or not the package is installed.
    code = f"import sys; sys.path.insert(0, {str(root / 'src')!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_is_quick(root: Path) -> None:
    best_ms = min(float(run(MEASURE, root)) for _ in range(5))
    assert best_ms < MOST_MS, f"import shoal takes {best_ms:.1f} ms, the budget is {MOST_MS}"


def test_import_loads_neither_torch_nor_a_sub_package(root: Path) -> None:
    loaded = set(run(LIST, root).split())
    assert "shoal" in loaded
    assert not loaded & {"torch", "numpy"}
    packages = {f"shoal.{path.parent.name}" for path in root.glob("src/shoal/*/__init__.py")}
    assert packages and not loaded & packages


def test_other_interpreters_import_nothing_from_the_working_directory(package) -> None:
    """Which may be somebody else's, with a torch.py of his own: `-P` leaves it out."""
    wrong = []
    for source in package:
        for node in ast.walk(source.tree):
            words = [ast.unparse(word) for word in getattr(node, "elts", [])]
            is_ours = not source.path.startswith("src/shoal/testing/")
            if words[:1] == ["sys.executable"] and words[1] != "'-P'" and is_ours:
                wrong.append(f"{source.path}: {' '.join(words)}")
    assert not wrong


def test_packages_start_empty(package) -> None:
    filled = [
        source.path
        for source in package
        if source.path.endswith("/__init__.py") and source.text and source.path not in WITH_NAMES
    ]
    assert not filled
