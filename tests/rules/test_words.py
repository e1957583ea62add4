"""Every file explains itself, and none speaks of one machine or leaves work lying about."""

import re
from pathlib import Path

import pytest

# Homes and check-outs of whoever wrote the line; a path in the project is relative.
MACHINE = re.compile(r"(?<![\w./~])/(?:work|root|home)/[\w.]")
UNFINISHED = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b")
# path -> why it may say so.
EXCEPTIONS: dict[str, str] = {}
BINARY = {".png", ".gif", ".jpg", ".svg", ".pdf", ".safetensors", ".whl", ".gz"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def forbidden(text: str) -> list[str]:
    return [
        f"line {number}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE, UNFINISHED)
        for found in pattern.finditer(line)
    ]


def test_no_file_speaks_of_a_machine_or_of_unfinished_work(files, root: Path) -> None:
    wrong = []
    for path in files:
        name = str(path.relative_to(root))
        if path.suffix not in BINARY and name not in EXCEPTIONS:
            wrong += [f"{name} {use}" for use in forbidden(path.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_every_python_file_has_a_head(sources) -> None:
    headless = []
    for source in sources:
        is_empty_package = source.path.endswith("__init__.py") and not source.text
        first = source.tree.body[0] if source.tree.body else None
        value = getattr(getattr(first, "value", None), "value", None)
        if not is_empty_package and not isinstance(value, str):
            headless.append(source.path)
    assert not headless, "no docstring at the head of: " + ", ".join(headless)


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        place = target.split("#")[0]
        is_elsewhere = "://" in place or place.startswith("mailto:")
        if place and not is_elsewhere and not (page.parent / place).exists():
            broken.append(f"{page.name} links to {target}, which does not exist")
    return broken


def test_pages_link_to_what_exists(files) -> None:
    pages = [path for path in files if path.suffix == ".md"]
    assert any(page.name == "README.md" for page in pages)
    broken = [line for page in pages for line in broken_links(page, page.read_text("utf-8"))]
    assert not broken, "\n".join(broken)


# Written with a gap (~), so that this file passes its own rule.
@pytest.mark.parametrize("line", ["see /wo~rk/x", "cd /ro~ot/x", "# TO~DO: later", "XX~X: fix"])
def test_forbidden_words_are_seen(line: str) -> None:
    assert not forbidden(line)
    assert forbidden(line.replace("~", ""))


@pytest.mark.parametrize("line", ["mktemp -d a.XXXXXX", "src/work/x", "https://x.org/home/y"])
def test_other_words_are_not(line: str) -> None:
    assert not forbidden(line)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").touch()
    text = "[a](other.md#part) [b](https://example.org) [c](#part) [d](missing.md)"
    assert broken_links(page, text) == ["page.md links to missing.md, which does not exist"]
