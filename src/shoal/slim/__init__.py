"""Smaller models: distil, prune, quantise and pack what a recipe trained.

    shoal.slim.prune("recipes/digits.py:small", "runs/digits-small-1", sparsity=0.8, out="small")

The functions are the verbs `shoal distill`, `prune`, `quantize` and `pack`; those that take a Run
return one that trains under every plan. They load when they are first used. Next: `figures.py`, for
what is measured before and after.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.slim.adapters import merge_adapters as merge_adapters
    from shoal.slim.adapters import save_adapters as save_adapters
    from shoal.slim.adapting import adapt as adapt
    from shoal.slim.distillation import Lessons as Lessons
    from shoal.slim.distillation import distill as distill
    from shoal.slim.distillation import train_student as train_student
    from shoal.slim.fusing import fuse as fuse
    from shoal.slim.masks import bake_masks as bake_masks
    from shoal.slim.packing import pack as pack
    from shoal.slim.packing import unpack as unpack
    from shoal.slim.pruning import prune as prune
    from shoal.slim.pruning import prune_in_training as prune_in_training
    from shoal.slim.quantization import quantize as quantize
    from shoal.slim.quantization import quantize_in_training as quantize_in_training
    from shoal.slim.quantization import unround as unround
    from shoal.slim.retraining import Training as Training

_NAMES = {  # by the module that has them
    "adapters": ("merge_adapters", "save_adapters"),
    "adapting": ("adapt",),
    "distillation": ("Lessons", "distill", "train_student"),
    "fusing": ("fuse",),
    "masks": ("bake_masks",),
    "packing": ("pack", "unpack"),
    "pruning": ("prune", "prune_in_training"),
    "quantization": ("quantize", "quantize_in_training", "unround"),
    "retraining": ("Training",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # which knows the names above, and should find those that are misspelt

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"shoal.slim.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module 'shoal.slim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
