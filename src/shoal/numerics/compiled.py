"""Modules that are compiled with torch.compile, and code that torch.func transforms.

Inside of a compiled one runs a graph of torch's: hooks on its submodules may be traced or skipped,
so Shoal sets none there. It counts as one block, whatever it consists of. Inside of a transform
(torch.func.jvp, vmap, grad) tensors stand for others, without memory of their own.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of it are compiled: by `torch.compile(module)` or by `module.compile()`."""
    call = module.__dict__.get("_compiled_call_impl")
    if getattr(call, "compiled", call) is not None:  # a pipeline may intercept it
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded with the first compilation
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_transformed() -> bool:
    """Whether a transform of torch.func runs this."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed(tensor: Tensor) -> Tensor:
    """What a tensor of a transform stands for; others are that themselves."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def compiled_in(model: nn.Module) -> Iterator[str]:
    """The names of the compiled modules of a model, which may be the model itself."""
    return (name for name, module in model.named_modules() if is_compiled(module))
