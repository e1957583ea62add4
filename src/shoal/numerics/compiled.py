"""Modules that are compiled with torch.compile.

Inside of one runs a graph of torch's: hooks on its submodules may be traced or skipped, so Shoal
sets none there. It counts as one block, whatever it consists of.
"""

import sys
from collections.abc import Iterator

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of it are compiled: by `torch.compile(module)` or by `module.compile()`."""
    call = module.__dict__.get("_compiled_call_impl")
    if getattr(call, "compiled", call) is not None:  # a pipeline may intercept it
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded with the first compilation
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def compiled_in(model: nn.Module) -> Iterator[str]:
    """The names of the compiled modules of a model, which may be the model itself."""
    return (name for name, module in model.named_modules() if is_compiled(module))
