"""The README is true: its commands and their options are known.

Commands are the lines of unlabelled and shell blocks that start with `shoal` or `make` (after `$`
in a `console` block, where the rest is output). The tree is a page of its own, written from the
code (`test_reference.py`).
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import click
import pytest

from shoal.plans.plan import Plan

FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = {"", "sh", "bash", "shell", "console"}
TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)


class Block(NamedTuple):
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(text)]


# ---- the commands


def commands(text: str) -> Iterator[list[str]]:
    """Each `shoal` or `make` command of the shell blocks, as words."""
    for block in blocks(text):
        if block.language not in SHELLS:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            line = line.strip()
            if block.language == "console" and not line.startswith("$ "):
                continue
            if re.match(r"(\$ )?([A-Z_]+=\S+ )*(\.venv/bin/)?(shoal|make)\b", line):
                yield from split_line(line.removeprefix("$ "))


def split_line(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;"):
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and words[0].removeprefix(".venv/bin/") in ("shoal", "make"):
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]
            words = []
        else:
            words.append(word)


def wrong_with(words: list[str], root: Path, group: click.Command) -> list[str]:
    program, *rest = words
    if program == "make":
        targets = set(TARGET.findall((root / "Makefile").read_text("utf-8")))
        asked = [word for word in rest if "=" not in word and not word.startswith("-")]
        return [f"there is no target {word!r}" for word in asked if word not in targets]
    command, rest = verb_of(group, rest)
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        return [f"there is no verb {rest[0]!r}"]
    known = {"--help"} | {name for param in command.params for name in option_names(param)}
    wrong = []
    for word, following in zip(rest, [*rest[1:], ""]):
        if word == "--":
            break
        name, _, value = word.partition("=")
        if name.startswith("-") and name not in known:
            wrong.append(f"{command.name} has no option {name}")
        if name == "--plan":
            Plan.parse(value or following)
        recipe = re.fullmatch(r"(\S+/\S+\.py)(?::(\w+))?", word)
        if recipe:
            wrong += wrong_with_recipe(root / recipe[1], recipe[2])
    return wrong


def verb_of(group: click.Command, words: list[str]) -> tuple[click.Command, list[str]]:
    """Walk down from the group to the verb that the words name, and what is left of them."""
    while isinstance(group, click.Group) and words:
        verb = group.get_command(click.Context(group), words[0])
        if verb is None:
            break
        group, words = verb, words[1:]
    return group, words


def option_names(parameter: click.Parameter) -> list[str]:
    is_option = isinstance(parameter, click.Option)
    return [*parameter.opts, *parameter.secondary_opts] if is_option else []


def wrong_with_recipe(path: Path, function: str | None) -> list[str]:
    if not path.exists():
        return [f"there is no file {path.name}"]
    if function and not re.search(rf"^def {function}\(", path.read_text("utf-8"), re.M):
        return [f"{path.name} has no function {function}"]
    return []


def test_the_commands_are_known(root: Path) -> None:
    from shoal.cli.main import verbs

    found = list(commands((root / "README.md").read_text("utf-8")))
    assert {words[0] for words in found} == {"shoal", "make"}, "README shows no command of one kind"
    wrong = [
        f"{shlex.join(words)}: {why}" for words in found for why in wrong_with(words, root, verbs)
    ]
    assert not wrong, "\n".join(wrong)


# ---- the rules themselves

EXAMPLE = """
```sh
make demo            # a minute
shoal train recipes/charlm.py:small --plan "data=2, accumulate=2" && shoal doctor
OMP_NUM_THREADS=1 .venv/bin/shoal run \\
    script.py --ranks 2 -- --own
```
```console
$ shoal train x.py
shoal is not a command here
```
```python
shoal = 1
```
"""


def test_the_commands_are_read() -> None:
    assert list(commands(EXAMPLE)) == [
        ["make", "demo"],
        ["shoal", "train", "recipes/charlm.py:small", "--plan", "data=2, accumulate=2"],
        ["shoal", "doctor"],
        ["shoal", "run", "script.py", "--ranks", "2", "--", "--own"],
        ["shoal", "train", "x.py"],
    ]


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("make test", True),
        ("make tset", False),
        ("shoal train a.py --plan data=2", True),
        ("shoal train a.py --plan=data=2", True),
        ("shoal --help", True),
        ("shoal train a.py --plam data=2", False),
        ("shoal fly", False),
        ("shoal train recipes/none.py:small", False),
    ],
)
def test_a_wrong_command_is_seen(line: str, is_right: bool, root: Path) -> None:
    options: list[click.Parameter] = [click.Argument(["recipe"]), click.Option(["--plan"])]
    train = click.Command("train", params=options)
    group = click.Group("shoal", commands={"train": train})
    assert (wrong_with(line.split(), root, group) == []) == is_right


def test_the_picture_of_a_run_is_that_of_the_demo(root: Path) -> None:
    """Made by `python examples/demo.py --svg docs/images/run.svg`."""
    spec = importlib.util.spec_from_file_location("demo", root / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    drawn = ElementTree.fromstring((root / "docs/images/run.svg").read_text("utf-8"))
    lines = [
        "".join(element.itertext()).replace("\xa0", " ").strip()
        for element in drawn.iter()
        if element.tag.endswith("text")
    ]
    assert f"$ {' '.join(demo.WORDS)}" in lines
    assert any(line.startswith(f"done: {demo.STEPS} steps") for line in lines)
    assert any("was killed by SIGKILL" in line for line in lines)
