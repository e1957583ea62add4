"""Where the processes of a run are started: on this machine, on hosts that join, on an engine.

A back end prepares the run where its processes will be, and starts, ends and reports them; the
supervisor decides which (`elastic/`). `shoal.testing.backends` has the tests that each must pass.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shoal.comm.endpoint import Endpoint
from shoal.events.events import OnEvent
from shoal.system.fork_server import Prepare, Processes

Facts = dict[str, Any]


class StartedRun(NamedTuple):
    """Processes that can be started now, and what the preparation found."""

    processes: Processes
    facts: Facts
    reach: Endpoint  # where members of the run find the supervisor
    num_hosts: int = 1
    end: Callable[[int, str], None] = lambda exit_code, cause: None  # once the run has ended
    hosts: tuple[int, ...] = ()  # of each seat, if there are several (`placement.py`)
    slots: Mapping[int, int] = {}  # how many ranks each host takes then


class Backend(Protocol):
    """Starts the processes of one run."""

    def start(
        self, prepare: Prepare, run_dir: Path, watch: OnEvent
    ) -> AbstractContextManager[StartedRun]:
        """Prepare the run, and be ready to start its processes until the block ends.

        `prepare` is called in the process that members are forked from; NotLoaded says why it
        failed. Nothing is left running after the block.
        """
        ...
