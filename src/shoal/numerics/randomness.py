"""Random numbers that do not depend on which rank computes what.

The generator is seeded on entering each block of the model, from (seed, step, piece, block), and
again on leaving it. So a dropout mask is the same at any number of ranks, a later
stage of a pipeline need not replay the draws of an earlier one, and a step that is done again
draws the same. A model without a list of blocks is one block. Draws must come from torch's
default generator of the device; Python's `random` and numpy are not covered.

A step of one's own may call parts of a model several times for one piece, and must not draw the
same each time. There the generator is seeded once for (seed, step, piece, phase), and goes on from
there as in plain torch; no plan that it works with starts in the middle of a model.

Cost: a few microseconds per piece and block; nothing for blocks made of layers that never draw.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.numerics.compiled import is_compiled

_MASK = (1 << 64) - 1


def derive_seed(seed: int, step: int, piece: int, block: int) -> int:
    """A 63-bit seed, its low 32 bits (all that torch's CPU generator uses) well mixed."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) & _MASK
    mixed = (mixed + piece * 0x94D049BB133111EB + block * 0xD6E8FEB86659FD93) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


def generator_of(device: str) -> torch.Generator:
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator


def blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists and sequences of a model, in order; none of a compiled
    module, whose inside is torch's."""
    if is_compiled(module):
        return
    if isinstance(module, nn.ModuleList | nn.Sequential):
        yield from (member for member in module if member is not None)
        return
    for child in module.children():
        yield from blocks_in(child)


_QUIET = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softmax),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    *(nn.Sequential, nn.ModuleList),
)


def may_draw(block: nn.Module) -> bool:
    """Whether a block could draw a random number: false only if all in it is known not to."""
    return any(type(module) not in _QUIET for module in block.modules())


def blocks_that_run(model: nn.Module) -> list[nn.Module]:
    """The blocks; for a block that is itself a list, which has no forward, its members."""
    waiting, found = list(blocks_in(model)), dict[nn.Module, None]()
    while waiting:
        block = waiting.pop(0)
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            waiting = [*block.children(), *waiting]
        elif block is not None:
            found[block] = None
    return list(found)


class PieceSeeds:
    """Seeds a model's blocks for one piece after another. `close` takes the hooks off."""

    def __init__(self, model: nn.Module, seed: int, device: str = "cpu", by_block: bool = True):
        """Without `by_block` there are no hooks: `enter` alone sets the generator."""
        self._seed = seed
        self.use(device)
        self._step, self._piece = 0, 0
        self.block = 0  # the last one that the generator was set for
        self.num_sets = 0  # how often it was set, for any block
        self._handles: list[RemovableHandle] = []
        for index, block in enumerate(dict.fromkeys(blocks_in(model)) if by_block else ()):
            if not may_draw(block):
                continue
            self._handles += [
                block.register_forward_pre_hook(self._set(2 * index + 1), prepend=True),
                block.register_forward_hook(self._set(2 * index + 2)),
            ]

    def use(self, device: str) -> None:
        """Draw on this device from now on."""
        self._generator = generator_of(device)

    def enter(self, step: int, piece: int, block: int = 0) -> None:
        """Call before each forward. The loss draws from the state that the model leaves."""
        self.at(step, piece)
        self.set(block)

    def at(self, step: int, piece: int) -> None:
        """Blocks that run from now on are this piece's; the generator stays as it is."""
        self._step, self._piece = step, piece

    def set(self, block: int) -> None:
        """Set the generator as this block's hooks do: for a stage that starts in the middle."""
        self.block = block
        self.num_sets += 1
        self._generator.manual_seed(derive_seed(self._seed, self._step, self._piece, block))

    @property
    def is_unused(self) -> bool:
        """Whether nothing was drawn since the generator was last set."""
        fresh = torch.Generator(self._generator.device)
        fresh.manual_seed(derive_seed(self._seed, self._step, self._piece, self.block))
        return torch.equal(fresh.get_state(), self._generator.get_state())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the generator and the position afterwards."""
        place, state = (self._step, self._piece, self.block), self._generator.get_state()
        try:
            yield
        finally:
            self._step, self._piece, self.block = place
            self._generator.set_state(state)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _set(self, block: int):  # type: ignore[no-untyped-def]  # pre-hooks and hooks differ in shape
        def set_generator(*_: object) -> None:
            self.set(block)

        return set_generator
