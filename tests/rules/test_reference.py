"""The reference pages say what the code says: `python docs/generate.py` writes them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", generator().PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    written = (ROOT / "docs/reference" / name).read_text("utf-8")
    assert written == generator().PAGES[name](), "run: python docs/generate.py"


def lost_on_the_walks(text: str) -> list[str]:
    """Files and names of the walks that the code does not have."""
    lost = []
    for entry in re.findall(r"^\d+\. \*\*.*?(?=^\d+\. |^## |\Z)", text, re.MULTILINE | re.DOTALL):
        files = re.findall(r"`([\w/]+\.py)`", entry)
        found = [next((ROOT / "src/shoal").rglob(name), None) for name in files]
        lost += [name for name, path in zip(files, found, strict=True) if path is None]
        code = "".join(path.read_text("utf-8") for path in found if path is not None)
        names = re.findall(r"`(?!\w+\.py`)(?:\w+\.)?(\w+)`", entry)
        lost += [name for name in names if not re.search(rf"\b{name}\b", code)]
    return lost


def test_the_walks_through_the_code_are_true() -> None:
    text = (ROOT / "docs/read-the-code.md").read_text("utf-8")
    assert len(re.findall(r"^\d+\. \*\*", text, re.MULTILINE)) == 25
    assert len(re.findall(r"^## A ", text, re.MULTILINE)) == 5
    assert not (lost := lost_on_the_walks(text)), lost
    assert lost_on_the_walks("1. **`absent.py`**: see `Nowhere`.\n") == ["absent.py", "Nowhere"]
