"""Imports only go down: each part of the package has a layer and imports its own or a lower one.

Imports inside functions count too, since a lazy import upward is still a dependency upward. Cycles
are looked for among imports that run when a module loads.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

# The storeys, from the lowest up: the first name below `shoal` of each part that stands there.
STOREYS = [
    # underneath
    ["errors", "logs", "world", "faults"],
    ["formatting", "system"],
    ["plans", "events", "storage", "numerics", "comm"],
    # a run
    ["parallel", "data"],
    ["sync"],
    ["checkpoint"],
    ["formats"],
    ["training"],
    ["elastic", "inference"],
    # around a run
    ["cluster", "cost"],
    ["launch", "api", "callbacks", "ui"],  # the end of a run writes its report
    ["verify", "doctor", "slim", "tuning"],
    ["cli"],
]
LAYERS = {name: number for number, names in enumerate(STOREYS) for name in names}
# Outside the layers: they may import everything, and nothing inside may import them.
ON_TOP = {"", "testing", "__main__"}


def part(module: str) -> str:
    """`comm` for shoal.comm.buckets, the empty name for shoal itself."""
    return module.split(".")[1] if "." in module else ""


def imported(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[str]:
    """The modules of `known` that the code below `tree` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner == "shoal.__version__":  # which is no module's, and loads none
                    continue
                if inner in known:
                    yield inner
                elif base in known:
                    yield base


def is_for_types_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def at_load(tree: ast.Module) -> ast.Module:
    """What runs when the module loads: no function bodies, nothing for type checkers alone."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if is_for_types_only(node) else self.generic_visit(node)

    stripped = Strip().visit(ast.parse(ast.unparse(tree)))
    assert isinstance(stripped, ast.Module)
    return stripped


def upward(module: str, imports: set[str]) -> list[str]:
    """What is wrong with these imports of this module."""
    here = part(module)
    if here in ON_TOP:
        return []
    if here not in LAYERS:
        return [f"{module}: {here!r} has no place in LAYERS; put it where it belongs"]
    wrong = []
    for other in sorted(imports):
        there = part(other)
        if there in ON_TOP:
            wrong.append(f"{module} imports {other}, which nothing inside may import")
        elif LAYERS.get(there, -1) > LAYERS[here]:
            wrong.append(f"{module} (layer {LAYERS[here]}) imports {other} (layer {LAYERS[there]})")
    return wrong


def cycle(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_only_go_down(package) -> None:
    known = {source.module for source in package}
    wrong = []
    for source in package:
        is_package = source.path.endswith("__init__.py")
        imports = set(imported(source.tree, source.module, is_package, known))
        wrong += upward(source.module, imports)
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_cycle(package) -> None:
    known = {source.module for source in package}
    imports = {
        source.module: set(
            imported(
                at_load(source.tree),
                source.module,
                source.path.endswith("__init__.py"),
                known,
            )
        )
        - {source.module}
        for source in package
    }
    assert not cycle(imports), " -> ".join(cycle(imports))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import shoal.cli.main", ["shoal.cli.main"]),
        ("from shoal.cli import main", ["shoal.cli.main"]),
        ("from shoal import cli", ["shoal.cli"]),
        ("from shoal import Run", ["shoal"]),
        ("from ..cli.main import main", ["shoal.cli.main"]),
        ("def f():\n    import shoal.cli.main", ["shoal.cli.main"]),
        ("import torch", []),
    ],
)
def test_every_form_of_import_is_seen(code: str, found: list[str]) -> None:
    known = {"shoal", "shoal.cli", "shoal.cli.main", "shoal.comm", "shoal.comm.buckets"}
    assert list(imported(ast.parse(code), "shoal.comm.buckets", False, known)) == found


def test_the_rules_catch_what_they_are_for() -> None:
    assert upward("shoal.errors", {"shoal.plans.plan"})
    assert upward("shoal.sync.allreduce", {"shoal.testing.ranks"})
    assert upward("shoal.sync.allreduce", {"shoal"})
    assert upward("shoal.helpers", set())
    assert not upward("shoal.sync.allreduce", {"shoal.comm.buckets", "shoal.numerics.buffers"})
    assert cycle({"a": {"b"}, "b": {"a"}})
    lazy = "if TYPE_CHECKING:\n    import shoal.b\ndef f():\n    import shoal.b\nx = 1"
    assert not list(imported(at_load(ast.parse(lazy)), "shoal.a", False, {"shoal.b"}))
