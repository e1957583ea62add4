"""Every example of `examples/` runs as its head says, and the notebook from top to bottom."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs/how-to/examples.md"
NOTEBOOK = EXAMPLES / "tour.ipynb"
LONGEST_S = 240


class Example(NamedTuple):
    """What follows `python` or `shoal`, what is printed at the end, and what must be installed."""

    name: str
    says: str
    needs: tuple[str, ...] = ()
    before: tuple[str, ...] = ()  # words before the file
    after: tuple[str, ...] = ()  # and after it


QUICK = Example("own_loop.py", "step 200 ", before=("-m", "shoal", "run", "--ranks", "2"))
LONG = (
    Example("buckets.py", r"ensemble +loss 0\.\d+ .*\nall data +loss"),
    Example("demo.py", "nothing: each step was committed exactly once"),
    Example("distillation.py", r"student, taught +1,124 weights"),
    Example("gan.py", "spread", before=("-m", "shoal", "train"), after=("--plan", "data=2")),
    Example("lora.py", r"what it writes +'butter B", ("transformers", "peft")),
    Example("recommender.py", r"user 42 +film +\d+: \d"),
    Example("tabular.py", r"balanced draws +\d"),
    Example("tuning.py", r"best: trial \d with", ("optuna",)),
    Example("vision.py", r"average +9\d\.\d%"),
)


def run_example(example: Example, directory: Path) -> str:
    """All that it wrote."""
    for module in example.needs:
        pytest.importorskip(module)
    place = EXAMPLES / example.name
    file = f"{place}:small" if "train" in example.before else str(place)
    done = subprocess.run(
        [sys.executable, *example.before, file, *example.after],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S)
def test_the_quickest_example(tmp_path: Path) -> None:
    assert re.search(QUICK.says, run_example(QUICK, tmp_path))


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("example", LONG, ids=lambda example: example.name)
def test_an_example(example: Example, tmp_path: Path) -> None:
    said = run_example(example, tmp_path)
    assert re.search(example.says, said), said


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S)
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=LONGEST_S, kernel_name="python3", resources=resources
    ).execute()
    said = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert "186 steps of 64 samples" in said and "tensor(0.9" in said
    assert (tmp_path / "runs/notebook-small-1/answers.npz").exists()


def test_the_notebook_is_kept_without_outputs() -> None:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_every_example_is_run_and_stands_on_the_page() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert there == {QUICK.name, NOTEBOOK.name, *(example.name for example in LONG)}
    page = PAGE.read_text("utf-8")
    assert not [name for name in there if f"../../examples/{name}" not in page]
