"""The pictures of pages show what the pages show now, of a run that was one."""

import hashlib
import importlib.util
import json
from pathlib import Path


def test_pictures_were_made_from_the_page_as_it_is(root: Path) -> None:
    spec = importlib.util.spec_from_file_location("pictures", root / "docs/pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    facts = json.loads(pictures.FACTS.read_text())
    again = "the page has changed: make its pictures again, by `python docs/pictures.py`"
    assert facts["page"] == pictures.page_digest(), again
    assert facts["state"] == "done" and facts["step"] == pictures.STEPS
    assert "rank 1 was lost" in facts["incidents"]
    assert set(facts["pictures"]) == {*pictures.PICTURES, pictures.SCREEN}
    for name, digest in facts["pictures"].items():
        assert hashlib.sha256((pictures.IMAGES / name).read_bytes()).hexdigest() == digest, name


def test_pages_show_every_picture(root: Path) -> None:
    text = "".join(page.read_text("utf-8") for page in (root / "docs").rglob("*.md"))
    for name in json.loads((root / "docs/images/pictures.json").read_text())["pictures"]:
        assert f"images/{name}" in text, f"no page shows {name}"
