"""Activation checkpointing: a block keeps its inputs only, and is run again in backward.

Memory for time: activations of one block at a time instead of all, for about a third more compute
(Chen et al. 2016, arXiv 1604.06174). Random state is restored for the second run, and buffers that
the block changes (BatchNorm's statistics) are not changed twice. Whatever a block writes to, small
buffers, attributes of its modules or an argument such as a cache, has in the second run the value
from before the first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shoal.errors import PlanError
from shoal.numerics.buffers import LARGE
from shoal.numerics.randomness import blocks_that_run

# What has nothing in it that a block could write to, or that is put back in another way.
_LEAVES = (torch.Tensor, nn.Module, ModuleType, type, str, bytes, int, float, complex, type(None))

HeldBuffers = list[tuple[Tensor, Tensor]]  # each with the value that it had

_OWN = vars(nn.Module()).keys()


class RecomputeContext:
    """The context of a block's second run: the mode of tensor parallelism, if the model is cut."""

    mode: AbstractContextManager[Any] | None = None


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The blocks whose inner activations are worth dropping: those made of several modules."""
    lists = blocks_that_run(model) or list(dict.fromkeys(model.children()))
    blocks = [block for block in lists if any(True for _ in block.parameters())]
    composite = [block for block in blocks if any(True for _ in block.children())]
    if not blocks:
        raise PlanError(
            f"recompute=blocks finds no blocks in this model: {type(model).__name__} has no "
            "submodule with parameters. Leave recompute out."
        )
    return composite or blocks


def recompute(blocks: list[nn.Module], recompute_context: RecomputeContext) -> None:
    """Let each block drop what is inside it."""
    for block in blocks:
        block.forward = partial(_dropped, block, block.forward, recompute_context)


def _dropped(
    block: nn.Module,
    forward: Callable[..., Any],
    recompute_context: RecomputeContext,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    given = ObjectSnapshot((args, kwargs), block)
    held = [(buffer, buffer.clone()) for buffer in block.buffers() if buffer.numel() <= LARGE]

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _SecondRun(block, recompute_context, given, held)

    # To stop the second run early, torch raises through the block's own code, which may catch it.
    with set_checkpoint_early_stop(False):
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _SecondRun:
    """May be entered again: a backward that is split in two runs the block for each of them."""

    def __init__(
        self,
        block: nn.Module,
        recompute_context: RecomputeContext,
        given: "ObjectSnapshot",
        held: HeldBuffers,
    ):
        self._run = partial(_second_run, block, recompute_context, given, held)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._run())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def _second_run(
    block: nn.Module,
    recompute_context: RecomputeContext,
    given: "ObjectSnapshot",
    held: HeldBuffers,
) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    now = ObjectSnapshot(given.root, block)
    given.restore()
    _put_back(held)
    try:
        with nullcontext() if recompute_context.mode is None else recompute_context.mode:
            yield
    finally:
        now.restore()
        _put_back(before)


@torch.no_grad()
def _put_back(held: HeldBuffers) -> None:
    for buffer, value in held:
        if not torch.equal(buffer, value):
            buffer.copy_(value)


class ObjectSnapshot:
    """What the lists, dicts and plain objects in a value, and the attributes of a block's modules,
    hold at one moment; tensors are not copied."""

    def __init__(self, root: Any, block: nn.Module):
        self.root = root
        self._modules = [(module, _attributes(module)) for module in block.modules()]
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        seen, waiting = set[int](), [root]
        waiting += [value for _, known in self._modules for value in known.values()]
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _LEAVES) and id(value) not in seen:
                seen.add(id(value))
                waiting += self._parts(value)

    def _parts(self, value: Any) -> Iterable[Any]:
        """What is in a value, which is kept if it can be written to."""
        if isinstance(value, tuple):
            return value
        if isinstance(value, list):
            self._lists.append((value, list(value)))
            return value
        if type(value) in (dict, OrderedDict):
            self._dicts.append((value, dict(value)))
            return list(value.values())
        held = getattr(value, "__dict__", None)
        return (held,) if type(held) is dict else ()

    def restore(self) -> None:
        for module, known in self._modules:
            for name in _attributes(module).keys() - known.keys():
                del module.__dict__[name]
            module.__dict__.update(known)
        for values, kept in self._lists:
            values[:] = kept
        for mapping, known in self._dicts:
            if mapping.keys() != known.keys() or any(mapping[k] is not known[k] for k in known):
                mapping.clear()
                mapping.update(known)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Those that are no parameters, buffers, submodules or hooks."""
    return {name: value for name, value in vars(module).items() if name not in _OWN}
