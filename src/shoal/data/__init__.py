"""Data: what to train on, in which order, and who loads what.

The names a recipe uses (`shoal.data.windows`, `shoal.data.catalog`) are loaded when first asked
for, so that importing this package loads neither torch nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import catalog as catalog
    from shoal.data import loader as loader
    from shoal.data import order as order
    from shoal.data import sources as sources
    from shoal.data import split as split
    from shoal.data.sources import Source as Source
    from shoal.data.sources import tensors as tensors
    from shoal.data.sources import windows as windows

_FROM_SOURCES = ("Source", "tensors", "windows")
_MODULES = ("catalog", "loader", "order", "sources", "split")


def __getattr__(name: str) -> Any:
    if name in _FROM_SOURCES:
        return getattr(importlib.import_module("shoal.data.sources"), name)
    if name in _MODULES:
        return importlib.import_module(f"shoal.data.{name}")
    raise AttributeError(f"module 'shoal.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*_FROM_SOURCES, *_MODULES))
