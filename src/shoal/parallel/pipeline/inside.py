"""What units make while they run, to find tensors that leave one by another door than return."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.parallel.pipeline.calls import leaves


class Inside(TorchFunctionMode):
    """Notes what is made while a unit runs."""

    def __init__(self, made: dict[int, Tensor]):
        super().__init__()
        self._made = made

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {address(x) for x in leaves((args, kwargs), []) if isinstance(x, Tensor)}
        for x in leaves(result, []):
            if type(x) is Tensor and x.numel() and address(x) not in given:  # not a view
                self._made.setdefault(address(x), x)
        return result


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """Of the tensors in a tree, to tell afterwards which were written into."""
    tensors = [x for x in leaves(tree, []) if isinstance(x, Tensor)]
    return [(x, x._version) for x in tensors if not x.is_inference()]
