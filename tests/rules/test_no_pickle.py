"""No pickle: not on the wire, not at rest, not in caches. Unpickling runs whatever code it is sent.

Seen by what is imported and called: pickle's modules, torch.save, torch.load without
`weights_only=True`, queues and pools of processes, and collectives that carry objects.
"""

import ast
from collections.abc import Iterator

import pytest

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PROCESSES = {"multiprocessing", "torch.multiprocessing"}
QUEUES = {"Queue", "SimpleQueue", "JoinableQueue", "Pool", "Manager"}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
TORCH = {"torch", "torch.serialization"}
# Path -> why it may.
EXCEPTIONS = {
    "bench/checkpoint_stall.py": "torch.save is one of the peers",
    "bench/tune.py": "joblib is one of the peers",
    "src/shoal/launch/fresh.py": "a Run goes to our own child through a pipe that it inherits",
}


def bound_names(tree: ast.AST, modules: set[str]) -> set[str]:
    """The names under which the code knows one of these modules, as it writes them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    names.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in modules:
                    names.add(alias.asname or alias.name)
    return names


def contexts(tree: ast.AST) -> set[str]:
    """What holds a multiprocessing context: `x` of `x = multiprocessing.get_context("fork")`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_context(node.value):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign) and node.value and is_context(node.value):
            names.add(ast.unparse(node.target))
    return names


def is_context(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_context")


def pickling(tree: ast.Module) -> Iterator[str]:
    """Each use of pickle in the code, as a line and a reason."""
    torch = bound_names(tree, TORCH)
    processes = bound_names(tree, PROCESSES) | contexts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield f"line {node.lineno}: imports {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            yield from pickling_names(node)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in torch and node.attr == "save":
                yield f"line {node.lineno}: torch.save pickles"
            elif node.attr in OBJECTS:
                yield f"line {node.lineno}: {node.attr} pickles"
            elif node.attr in QUEUES and (owner in processes or is_context(node.value)):
                yield f"line {node.lineno}: {owner}.{node.attr} pickles"
            elif node.attr == "ProcessPoolExecutor":
                yield f"line {node.lineno}: {node.attr} pickles"
        elif isinstance(node, ast.Call):
            yield from pickling_call(node, torch)


def pickling_names(node: ast.ImportFrom) -> Iterator[str]:
    module = node.module or ""
    for alias in node.names:
        if module.split(".")[0] in MODULES:
            yield f"line {node.lineno}: imports {module}"
        elif module in TORCH and alias.name in ("save", "load"):
            yield f"line {node.lineno}: write torch.{alias.name} in full, so that it is seen"
        elif module in PROCESSES and alias.name in QUEUES:
            yield f"line {node.lineno}: {module}.{alias.name} pickles"
        elif alias.name in OBJECTS or alias.name == "ProcessPoolExecutor":
            yield f"line {node.lineno}: {alias.name} pickles"


def pickling_call(node: ast.Call, torch: set[str]) -> Iterator[str]:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "load":
        only = given.get("weights_only")
        safe = isinstance(only, ast.Constant) and only.value is True
        if ast.unparse(function.value) in torch and not safe:
            yield f"line {node.lineno}: torch.load without weights_only=True unpickles"
    allowed = given.get("allow_pickle")
    if allowed is not None and not (isinstance(allowed, ast.Constant) and allowed.value is False):
        yield f"line {node.lineno}: allow_pickle"


def test_nothing_is_pickled(shipped) -> None:
    wrong = [
        f"{source.path} {use}"
        for source in shipped
        for use in pickling(source.tree)
        if source.path not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "import torch\ntorch.save(x, p)",
        "import torch as t\nt.save(x, p)",
        "from torch import load",
        "import torch\ntorch.load(p)",
        "import torch\ntorch.load(p, weights_only=False)",
        "import multiprocessing as mp\nmp.Queue()",
        "from multiprocessing import Pool",
        "import multiprocessing as mp\nc = mp.get_context('fork')\nc.SimpleQueue()",
        "from torch import multiprocessing\nmultiprocessing.get_context('spawn').Queue()",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "from concurrent.futures import ProcessPoolExecutor",
        "import numpy\nnumpy.load(p, allow_pickle=True)",
    ],
)
def test_pickle_is_seen(code: str) -> None:
    assert list(pickling(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(p, weights_only=True)",
        "import queue\nqueue.SimpleQueue()",
        "import json\njson.load(f)",
        "from safetensors.torch import save_file, load_file",
        "import multiprocessing as mp\nmp.get_context('fork').Process(target=f)",
    ],
)
def test_what_is_allowed_is_not_seen(code: str) -> None:
    assert not list(pickling(ast.parse(code)))
