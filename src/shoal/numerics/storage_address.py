"""Where a tensor's memory is, by which views of one storage are known."""

from torch import Tensor


def storage_address(tensor: Tensor) -> int:
    """Where its storage begins; 0 if it has none: sparse, or wrapped by a transform. A fake
    tensor, which has no memory, is known by the storage's own place."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if hasattr(tensor, "fake_mode") else storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
