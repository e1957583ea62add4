"""Sizes that keep the code readable: files, functions, arguments, interfaces.

A budget is not a target. Whoever must break one adds a line to EXCEPTIONS with the reason.
"""

import ast
from collections.abc import Iterator

FILE_LINES = 600
FUNCTION_LINES = 60
ARGUMENTS = 8
METHODS = 8
# Files with a budget of their own.
LINES_OF = {"src/shoal/verify/reference.py": 160}
# "path" or "path:name" -> why it may be larger.
EXCEPTIONS: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_lines(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_arguments(node: Function) -> int:
    """Arguments a caller gives: without self or cls, without what ** and * collect."""
    named = [*node.args.posonlyargs, *node.args.args]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    return len(named) + len(node.args.kwonlyargs)


def protocols(tree: ast.AST) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            if any(ast.unparse(base).split(".")[-1] == "Protocol" for base in bases):
                yield node


def over_budget(path: str, tree: ast.Module, lines: int) -> Iterator[tuple[str, str]]:
    """Everything in a file that is too large: its name in EXCEPTIONS, and what is wrong."""
    most = LINES_OF.get(path, FILE_LINES)
    if lines > most:
        yield path, f"{path} has {lines} lines, and the budget is {most}"
    for node in functions(tree):
        name = f"{path}:{node.name}"
        if num_lines(node) > FUNCTION_LINES:
            yield name, f"{name} has {num_lines(node)} lines, and the budget is {FUNCTION_LINES}"
        if num_arguments(node) > ARGUMENTS:
            yield name, f"{name} has {num_arguments(node)} arguments, the budget is {ARGUMENTS}"
    for protocol in protocols(tree):
        name = f"{path}:{protocol.name}"
        methods = sum(isinstance(node, Function) for node in protocol.body)
        if methods > METHODS:
            yield name, f"{name} has {methods} methods, and the budget is {METHODS}"


def test_budgets_are_kept(shipped) -> None:
    wrong = [
        sentence
        for source in shipped
        for name, sentence in over_budget(source.path, source.tree, source.num_lines)
        if name not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_files_with_a_budget_of_their_own_exist(package) -> None:
    assert set(LINES_OF) <= {source.path for source in package}


def test_exceptions_are_needed_and_explained(shipped) -> None:
    needed = {
        name
        for source in shipped
        for name, _ in over_budget(source.path, source.tree, source.num_lines)
    }
    assert set(EXCEPTIONS) <= needed
    assert all(EXCEPTIONS.values())


def test_the_reference_shares_nothing_with_what_it_judges(package) -> None:
    judged = ("shoal.sync", "shoal.parallel", "shoal.comm", "torch.distributed")
    found = [source for source in package if source.path == "src/shoal/verify/reference.py"]
    assert found, "src/shoal/verify/reference.py is missing"
    names = set()
    for node in ast.walk(found[0].tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports of the reference in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    wrong = {name for name in names if any(f"{name}.".startswith(f"{bad}.") for bad in judged)}
    assert not wrong


def test_the_rules_catch_what_they_are_for() -> None:
    method = "    def m{}(self): ...\n"
    code = "def long(" + ", ".join("abcdefghi") + "):\n" + "    x = 1\n" * 60
    code += "class Wide(Protocol[T]):\n" + "".join(method.format(i) for i in range(9))
    found = [name for name, _ in over_budget("file.py", ast.parse(code), 601)]
    assert found == ["file.py", "file.py:long", "file.py:long", "file.py:Wide"]
    assert list(over_budget("src/shoal/verify/reference.py", ast.parse(""), 161))
    assert not list(over_budget("file.py", ast.parse("def f(self, a): ..."), 600))
