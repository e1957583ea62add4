"""Whether ranks are about to train the same thing, and what differs first, by name.

Ranks that a launcher started each made their Run themselves: an environment variable, another
version or an unseeded draw may have made one of them unlike, and the others would train on with
it, or break in the middle of a message. `facts_of` describes a run as text by name;
`refuse_unlike` lets ranks compare such texts by a digest, and names the rank and the difference.

Of functions (loss, schedule, ...) the code counts, with the numbers, tensors and functions that it
uses from outside of itself; not where it stands. A number whose name says that it is a rank's own
(`rank`, `is_main`, `device`, ...) may differ.
"""

import dataclasses
import functools
import inspect
import platform
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal import __version__
from shoal.comm.collectives import Group
from shoal.comm.wire import bytes_of, digest_number, digest_of
from shoal.data.identity import content_name
from shoal.data.orders import order_name, order_of
from shoal.data.sources import stream_of
from shoal.data.transforms.randomness import drawing_from
from shoal.errors import UsageError
from shoal.plans.plan import Plan
from shoal.sync.state import broadcast_bytes
from shoal.training.run import Run

FIRST_WEIGHTS = "first value of "  # how facts begin that a newcomer's may differ in
_DEPTH = 4  # of functions that use functions
_OWN = re.compile("rank|main|master|chief|leader|device|gpu|pid|port", re.IGNORECASE)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def digest_of_texts(told: Mapping[str, str]) -> float:
    """Of names and texts."""
    return digest_number([msgspec.msgpack.encode(sorted(told.items()))])


def digest_of_tensor(tensor: Tensor) -> str:
    """Of its elements."""
    return f"{digest_of([bytes_of(in_order(tensor.detach().cpu()))]):016x}"


def in_order(tensor: Tensor) -> Tensor:
    """The same elements, one after another. What was expanded from one counts as contiguous."""
    if tensor.is_contiguous() and 0 not in tensor.stride():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def first_unlike_pair(digests: Sequence[float], ranks: Sequence[int]) -> tuple[int, int] | None:
    """A rank whose digest is another than most ranks have, and one of those; None if all agree."""
    found = [digests[rank] for rank in ranks]
    usual = Counter(found).most_common(1)[0][0]
    odd = [rank for rank in ranks if digests[rank] != usual]
    return (odd[0], next(r for r in ranks if digests[r] == usual)) if odd else None


def first_difference(group: Group, pair: tuple[int, int], told: Mapping[str, str]) -> str:
    """What the two ranks differ in, in words. Every rank must call it, with what it told."""
    own = msgspec.msgpack.encode(dict(told))
    odd, usual = (
        msgspec.msgpack.decode(broadcast_bytes(group, rank, own), type=dict[str, str])
        for rank in pair
    )
    for name in {**usual, **odd}:
        if odd.get(name) != usual.get(name):
            here, there = (_shown(found.get(name)) for found in (odd, usual))
            return f"{name} is {here} on rank {pair[0]} and {there} on rank {pair[1]}"
    return f"rank {pair[0]} and rank {pair[1]} told unlike things"


def _shown(text: str | None) -> str:
    if text is None:
        return "absent"
    return text if len(text) <= 200 else f"{text[:200]}..."


def refuse_unlike(group: Group, facts: Mapping[str, str], step: int) -> None:
    """Compare facts of runs. Every rank must call it, with the step that it is at.

    First weights do not count once steps were made: a newcomer takes what they have become.
    """
    has_begun = any(row[0] for row in group.all_gather_numbers([step]))
    told = {n: t for n, t in facts.items() if not (has_begun and n.startswith(FIRST_WEIGHTS))}
    rows = group.all_gather_numbers([digest_of_texts(told)])
    pair = first_unlike_pair([row[0] for row in rows], range(group.num_ranks))
    if pair is not None:
        raise UsageError(
            f"Ranks are about to train unlike things: {first_difference(group, pair, told)}. All "
            "ranks of a run need the same script, settings, data, and versions of Shoal, torch "
            "and Python."
        )


def facts_of(run: Run, plan: Plan, model: nn.Module) -> dict[str, str]:
    """What must be the same on all ranks, by name. Costs a pass over the model."""
    facts = {"the version of shoal": __version__, "the version of torch": version("torch")}
    facts["the version of Python"] = platform.python_version()
    facts["the plan"] = repr(str(plan))
    facts["the number of steps"] = str(run.num_steps())
    facts |= {
        f"Run.{f.name}": describe_value(getattr(run, f.name)) for f in dataclasses.fields(run)
    }
    facts |= _of_data(run) | _of_model(model) | _of_optimizer(run.make_optimizer(model))
    for name in ("loss", "step", "schedule", "collate", "optimizer", *run.metrics):
        used = run.metrics[name] if name in run.metrics else getattr(run, name)
        facts |= dict(_of_function(used, f"Run.{name}", _DEPTH))
    return facts


def _of_data(run: Run) -> dict[str, str]:
    """By its length and order, and by what can be told at once of its samples."""
    facts = {"the number of samples": str(len(run.data))}
    last = 0 if stream_of(run.data) is not None else len(run.data) - 1
    facts["the order of samples"] = order_name(order_of(run.data), run.seed)
    if content := content_name(run.data, may_sample=False):
        return facts | {"the data": content}
    for index in (0, last):
        # A look changes no draw that follows, and a bad sample is said where it is needed.
        with drawing_from((0,)), suppress(Exception):
            first, again = (describe_value(_rounded(run.data[index])) for _ in range(2))
            if first == again:  # or it is another each time
                facts[f"sample {index}"] = first
    return facts


def _rounded(sample: Any) -> Any:
    """Fractions in few digits, since another machine may decode or round a picture otherwise."""
    return tree_map(_in_few_digits, sample)


def _in_few_digits(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided:
        found = leaf.detach().double()
        return f"{_form(leaf)} with the mean {found.mean():.1e}, at most {found.abs().max():.1e}"
    return f"{leaf:.1e}" if isinstance(leaf, float) else leaf


def _of_model(model: nn.Module) -> dict[str, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    facts = {f"the type and shape of {name}": _form(tensor) for name, tensor in named}
    facts["the model"] = _ADDRESS.sub("", repr(model))
    for name, module in model.named_modules():
        facts |= dict(_of_object(module, name or "the model itself", int | float | Tensor))
    for name, tensor in named:
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.dtype.itemsize:
            facts[f"{FIRST_WEIGHTS}{name}"] = f"one with the digest {digest_of_tensor(tensor)}"
    return facts


def _form(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)}{', frozen' if not tensor.requires_grad else ''}"


def _of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    facts = {"the optimizer": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        place = f"optimizer.param_groups[{number}]"
        facts |= {f"{place}[{k!r}]": describe_value(v) for k, v in group.items() if k != "params"}
        facts[f"the number of parameters in {place}"] = str(len(group["params"]))
    return facts


def describe_value(value: Any) -> str:
    """A value as text that is the same in every process that holds the same."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return repr(value.item())
        return f"{_form(value)} with the digest {digest_of_tensor(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe_value, value))})"
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"a {type(value).__qualname__}"


def _of_function(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    """What is known of a function, or of what is called as one, as facts."""
    if isinstance(value, functools.partial):
        yield f"the arguments of {name}", describe_value([value.args, value.keywords])
        value = value.func
    if inspect.ismethod(value):
        yield from _of_object(value.__self__, f"the object of {name}")
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield f"the code of {name}", f"that of {value.__qualname__} ({_code(value.__code__)})"
        yield f"the defaults of {name}", describe_value([value.__defaults__, value.__kwdefaults__])
        if depth:
            for used, content in _used_by(value):
                yield from _of_used(content, f"{used} in {name}", depth - 1)
    elif isinstance(value, type) or inspect.isbuiltin(value):
        yield name, value.__qualname__
    elif value is not None:
        yield from _of_object(value, name)
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    yield f"{name}.{key}", describe_value(tensor)
        called = type(value).forward if isinstance(value, nn.Module) else type(value).__call__
        if isinstance(called, types.FunctionType) and depth:
            yield from _of_function(called, f"{name}()", depth - 1)


def _of_object(
    value: Any, name: str, kinds: Any = str | int | float | Tensor
) -> Iterator[tuple[str, str]]:
    """An object that is called, such as nn.CrossEntropyLoss(): its class, numbers and tensors."""
    yield name, type(value).__qualname__
    own = getattr(value, "__dict__", {})
    for key, content in own.items():
        if isinstance(content, kinds) and not _OWN.search(key):
            yield f"{name}.{key}", describe_value(content)


def _of_used(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    """A variable that a function uses from outside: numbers and tensors by value, functions."""
    if isinstance(value, int | float) and not _OWN.search(name):
        yield name, repr(value)
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        yield name, describe_value(value)
    elif isinstance(value, types.FunctionType | functools.partial | nn.Module):
        yield from _of_function(value, name, depth)


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Closure and global variables by name; a module's functions are known by its version."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in sorted(_names_in(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names_in(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


def _code(code: types.CodeType) -> str:
    """A digest of what it does, wherever it stands."""
    return f"{digest_of([msgspec.msgpack.encode(_content(code))]):016x}"


def _content(code: types.CodeType) -> list[Any]:
    return [code.co_code, [_constant(c) for c in code.co_consts], [*code.co_names]]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _content(value)
    if isinstance(value, frozenset):  # in whatever order this process has it
        return sorted(map(repr, value))
    return repr(value)
