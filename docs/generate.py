"""The reference pages that follow from the code: `python docs/generate.py` writes them.

The tree, the keys of a plan, the verbs and their options, the fields of a Run, exit codes: each is
described once, in the code, and `tests/rules/test_reference.py` fails if a page says something
else. Pages about ideas are written by hand and live elsewhere in docs/.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import click

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by docs/generate.py from the code; change it there. -->"


def page(title: str, intro: str, body: str) -> str:
    return f"{NOTE}\n\n# {title}\n\n{intro}\n\n{body.rstrip()}\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell_of(cell) for cell in line) + " |" for line in lines)


def cell_of(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- the tree


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def modules_below(folder: Path) -> Iterator[tuple[str, ...]]:
    for path in sorted(folder.rglob("*.py")):
        if path.name != "__init__.py":
            yield f"`{path.relative_to(folder)}`", first_line(path)


def tree() -> str:
    package = ROOT / "src/shoal"
    loose = [(f"`{path.name}`", first_line(path)) for path in sorted(package.glob("*.py"))]
    parts = ["## At the top", table(("file", "what it is"), loose)]
    for folder in sorted(path.parent for path in package.glob("*/__init__.py")):
        parts += [f"## {folder.name}/", table(("file", "what it is"), list(modules_below(folder)))]
    intro = (
        "Every module of `src/shoal` with the first sentence of its docstring. Imports only go "
        "down; `tests/rules/test_layers.py` has the storeys. [Read the code](../read-the-code.md) "
        "is the way in."
    )
    return page("The tree", intro, "\n\n".join(parts))


# ---- plans


def plan_keys() -> str:
    from shoal.plans.keys import KEYS
    from shoal.plans.plan import Plan

    usual = {name: getattr(Plan(), name) for name in KEYS}
    rows = [
        (f"`{name}`", f"`{key.values}`", f"`{shown(usual[name])}`", key.meaning)
        for name, key in KEYS.items()
    ]
    intro = (
        "A plan is `key=value` pairs, separated by spaces or commas, as in "
        '`--plan "data=2 zero=1"`. A key without effect, and keys that do not go together, are '
        "refused before a process starts."
    )
    return page("Keys of a plan", intro, table(("key", "values", "default", "meaning"), rows))


def shown(value: object) -> str:
    return "auto" if value is None else str(value)


# ---- the command line


def verbs() -> str:
    from shoal.cli.main import verbs as group

    parts = list(commands(group, "shoal"))
    intro = (
        "`shoal VERB --help` prints the same. With `--json` the last line of standard output is "
        "one JSON object with `exit_code`; where a verb fails without a result, `error` says why."
    )
    return page("Verbs", intro, "\n\n".join(parts))


def commands(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            found = command.get_command(context, verb)
            assert found is not None
            yield from commands(found, f"{name} {verb}")
        return
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {name}\n\n`{name} {usage}`\n\n{help_of(command)}"
    rows = [option_row(parameter, context) for parameter in command.params]
    found_rows = [row for row in rows if row is not None]
    if found_rows:
        yield table(("option", "meaning"), found_rows)


def help_of(command: click.Command) -> str:
    """The help as Markdown: what stands under a \\b is shown as it is."""
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(
        "```sh\n" + part.removeprefix("\b\n") + "\n```" if part.startswith("\b") else part
        for part in parts
    )


def option_row(parameter: click.Parameter, context: click.Context) -> tuple[str, ...] | None:
    record = parameter.get_help_record(context)
    return None if record is None else (f"`{record[0]}`", record[1])


# ---- the Run


def run_fields() -> str:
    path = ROOT / "src/shoal/training/run.py"
    text = path.read_text("utf-8")
    found = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "Run"
    )
    rows = [field_row(node, text) for node in found.body if isinstance(node, ast.AnnAssign)]
    intro = (
        "A recipe returns a `shoal.Run`. Fields with a plain value can be set on the command line, "
        "as in `--set steps=50`. [Write a recipe](../how-to/write-a-recipe.md) shows them at work."
    )
    return page("Fields of a Run", intro, table(("field", "type", "default", "meaning"), rows))


def field_row(node: ast.AnnAssign, text: str) -> tuple[str, ...]:
    lines = text.splitlines()
    comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
    default = "required" if node.value is None else f"`{ast.unparse(node.value)}`"
    default = re.sub(r"`field\(default_factory=(\w+)\)`", r"`\1()`", default)
    return f"`{ast.unparse(node.target)}`", f"`{ast.unparse(node.annotation)}`", default, comment


# ---- exit codes


def exit_codes() -> str:
    from shoal import errors

    kinds = [
        (f"`{name}`", str(kind.exit_code), " ".join((kind.__doc__ or "").split("\n\n")[0].split()))
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.ShoalError)
    ]
    codes = [
        ("0", "done"),
        ("1", "the recipe's own error, or a result that is not as it should be"),
        ("2", "usage, plan or input is wrong; nothing was started"),
        (str(errors.RUN_AGAIN), "stopped after a checkpoint: the command goes on with --resume"),
        ("128 + n", "ended by signal n"),
    ]
    body = table(("code", "meaning"), codes) + "\n\n## Errors\n\n"
    body += table(("class of `shoal.errors`", "exit code", "meaning"), kinds)
    return page("Exit codes and errors", "Every verb uses the same.", body)


# ---- events


def events() -> str:
    from shoal.events import events as module

    kinds = get_args(module.Event)
    intro = (
        "What happens in a run, as lines of `events.jsonl` in its directory, and as what "
        "`shoal.train(..., progress=function)` gives to a function. Every event has `event`, its "
        "name, and `time`. One of a seat has `rank`, and `server` if a server sits there."
    )
    rows = [
        (
            f"`{kind.__struct_config__.tag}`",
            ", ".join(f"`{name}`" for name in kind.__struct_fields__ if name != "time"),
            " ".join(inspect.cleandoc(kind.__doc__ or "").split()),
        )
        for kind in kinds
    ]
    return page("Events", intro, table(("event", "fields", "meaning"), rows))


PAGES: dict[str, Callable[[], str]] = {
    "tree.md": tree,
    "plan.md": plan_keys,
    "verbs.md": verbs,
    "run.md": run_fields,
    "events.md": events,
    "exit-codes.md": exit_codes,
}


def main() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    for name, make in PAGES.items():
        (ROOT / "docs/reference" / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
