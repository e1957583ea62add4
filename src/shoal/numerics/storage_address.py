"""Where a tensor's memory is, by which views of one storage are known."""

from torch import Tensor


def storage_address(tensor: Tensor) -> int:
    """Where its storage begins; 0 if it has none: sparse, or wrapped by a transform."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
