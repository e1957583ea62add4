"""The reference pages say what the code says: `python docs/generate.py` writes them."""

import importlib.util
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
