"""What a forked process must do before it uses inherited locks and sockets: drop them.

Ranks are forked from a process that has loaded the recipe, and so may have opened the cache. Each
object that holds a lock or a connection is registered here by a weak reference, and its
`after_fork` is called in the child before anything else of the child runs.
"""

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    def after_fork(self) -> None: ...


_watched: "weakref.WeakSet[ForkAware] | None" = None


def watch(one: ForkAware) -> None:
    """Call `one.after_fork()` in every process that is forked while `one` is in use."""
    global _watched
    if _watched is None:
        _watched = weakref.WeakSet()
        os.register_at_fork(after_in_child=_in_child)
    _watched.add(one)


def _in_child() -> None:
    for one in list(_watched or ()):
        one.after_fork()
