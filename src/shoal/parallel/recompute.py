"""Activation checkpointing: a block keeps its inputs only, and is run again in backward.

Memory for time: activations of one block at a time instead of all, for about a third more compute
(Chen et al. 2016, arXiv 1604.06174). Random state is put back for the second run, and buffers it
changes (BatchNorm's statistics) are not changed twice.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import PlanError
from shoal.numerics.randomness import blocks_in


class Again:
    """What the second run of a block is done in: the mode that runs a cut model, if it is cut."""

    mode: AbstractContextManager[Any] | None = None


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The blocks whose inner activations are worth dropping: those made of several modules."""
    lists = dict.fromkeys(blocks_in(model)) or dict.fromkeys(model.children())
    blocks = [block for block in lists if any(True for _ in block.parameters())]
    composite = [block for block in blocks if any(True for _ in block.children())]
    if not blocks:
        raise PlanError(
            f"recompute=blocks finds no blocks in this model: {type(model).__name__} has no "
            "submodule with parameters. Leave recompute out."
        )
    return composite or blocks


def recompute(blocks: list[nn.Module], again: Again) -> None:
    """Let each block drop what is inside it."""
    for block in blocks:
        block.forward = partial(_dropped, block, block.forward, again)


def _dropped(
    block: nn.Module, forward: Callable[..., Any], again: Again, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _SecondRun(block, again)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _SecondRun:
    """May be entered again: a backward that is split in two runs the block for each of them."""

    def __init__(self, block: nn.Module, again: Again):
        self._run = partial(_second_run, block, again)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._run())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def _second_run(block: nn.Module, again: Again) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        with nullcontext() if again.mode is None else again.mode:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
