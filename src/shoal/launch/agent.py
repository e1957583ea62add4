"""Be a host of a run that another machine started: what `shoal agent` and `shoal join` call.

Read next: `cluster/host_agent.py`, for what the agent does; `prepare.py`, for what it prepares.
"""

from functools import partial
from pathlib import Path

from shoal.cluster.backend import Facts
from shoal.cluster.host_agent import AgentOptions, HostRun, Tell, serve_run
from shoal.cluster.host_channel import RunEnded
from shoal.cluster.invitation import Invitation
from shoal.system.fork_server import WorkerMain
from shoal.training.options import Recipe, find_named


def serve(invitation: Invitation, tell: Tell, address: str | None = None) -> RunEnded:
    """Join the run and serve it until it is over. NotLoaded if it cannot be prepared here."""
    return serve_run(invitation, AgentOptions(_prepare, tell, address))


def _prepare(here: HostRun) -> tuple[Facts, WorkerMain]:
    """In the fork server."""
    from shoal.launch.prepare import prepare_run  # which loads torch

    wanted = here.run
    recipe = Recipe(wanted.recipe, partial(find_named, wanted.spec), wanted.settings)
    return prepare_run(recipe, wanted.options, Path(here.run_dir), joins=True)
