"""Dependencies that only some users need, imported when used."""

import importlib
from types import ModuleType

from shoal.errors import UsageError


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} is not installed, and this needs it. Install it with: "
            f"pip install 'shoal[{extra}]'"
        ) from error
