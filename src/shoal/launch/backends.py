"""Where the processes of a run start, by the name that `on=` and `--on` take.

A back end (`cluster/backend.py`) is one line in BACKENDS: its name, and the function that makes it.
What follows the name after a colon is the back end's own, as in `hosts:a,b,c`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.cluster.backend import Backend
from shoal.cluster.hosts import HostsBackend
from shoal.cluster.local import LocalBackend
from shoal.errors import UsageError, nearest
from shoal.training.options import Recipe

if TYPE_CHECKING:
    from shoal.launch.train import Options

JOIN_TIMEOUT_S = 600.0
Factory = Callable[[str, Recipe, "Options"], Backend]


def make_backend(recipe: Recipe, options: "Options") -> Backend:
    """The back end that a run is asked to use."""
    name, address = check_on(options.on)
    return BACKENDS[name](address, recipe, options)


def check_on(on: str) -> tuple[str, str]:
    """The name of a back end that there is, and what follows it."""
    name, _, address = on.partition(":")
    if name not in BACKENDS:
        raise UsageError(f"--on {on}: there is no such back end. {nearest(name, BACKENDS)}")
    return name, address


def _local(address: str, recipe: Recipe, options: "Options") -> Backend:
    """This machine, and with `--listen` the hosts that join it."""
    if address:
        raise UsageError(f"--on local:{address}: local is this machine, and takes no address.")
    if options.listen is None:
        return LocalBackend()
    if not recipe.is_named:
        raise UsageError(
            "Other hosts load the recipe by its name, and this one has none that they could find. "
            "Give it as file.py:function, in a file that all hosts see."
        )
    return HostsBackend(
        address=options.listen,
        timeout_s=options.join_timeout_s or JOIN_TIMEOUT_S,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        recipe=recipe.name,
        settings=dict(recipe.settings),
        options=options.start_options(),
    )


BACKENDS: dict[str, Factory] = {"local": _local}
