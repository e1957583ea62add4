"""Look at a recipe in a process of its own, and bring back what was found; no rank is started.

The recipe's code, its threads and its memory stay there. What it finds comes through a file: of
many ranks it is longer than a message of the fork server may be.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shoal.cluster.local import prepared_fork_server
from shoal.plans.plan import Plan
from shoal.training.options import Recipe

if TYPE_CHECKING:
    from shoal.cluster.backend import Facts
    from shoal.system.fork_server import WorkerMain, WorkerSpec
    from shoal.training.run import Run

T = TypeVar("T")


def inspect_recipe(
    recipe: Recipe, look: "Callable[[Run], T]", kind: type[T], plan: str | None = None
) -> T:
    """What `look`, called there with the Run, returns: a record of this kind.

    `plan` says in which precision the recipe computes. Raises NotLoaded. Call this from the main
    thread of a process without other threads.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        directory = Path(name)

        def prepare() -> "tuple[Facts, WorkerMain]":
            from shoal.elastic.worker import set_rank_threads
            from shoal.numerics.precision import environment_for

            set_rank_threads()
            if plan is not None:  # before the recipe computes anything
                os.environ.update(environment_for(Plan.parse(plan).precision))
            run, _ = recipe.load()
            (directory / "found").write_bytes(msgspec.msgpack.encode(look(run)))
            return {}, _start_no_rank

        with prepared_fork_server(prepare, directory / "recipe.log"):
            return msgspec.msgpack.decode((directory / "found").read_bytes(), type=kind)


def _start_no_rank(spec: "WorkerSpec") -> int:
    raise AssertionError("who only looks starts no rank")
