"""From a command to a finished run: the nursery, then the supervisor, and nothing left behind."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shoal.cluster.hosts import Hosts, Listening, gathered
from shoal.cluster.invitation import withdraw
from shoal.cluster.local import nursed
from shoal.cluster.post import Farewell
from shoal.comm.reach import Reach
from shoal.comm.unix import socket_directory
from shoal.elastic.membership import Membership
from shoal.elastic.resizes import open_resizes
from shoal.elastic.supervise import Outcome, Supervisor, Watch
from shoal.plans.plan import Plan
from shoal.system.fork_server import Prepare

Facts = dict[str, Any]


def launch(
    prepare: Prepare,
    run_dir: Path,
    *,
    watch: Watch,
    members: Callable[[Facts], Membership],
    prepared: Callable[[Facts], None] = lambda facts: None,
    can_resize: bool = False,
    listening: Listening | None = None,
    stop_timeout_s: float | None = None,
) -> Outcome:
    """Prepare in a warm process, fork the ranks from it and supervise them to the end.

    `prepared` is told what the preparation found, before any rank starts. With `can_resize` the
    run hears requests for another size; with `listening` it waits for other hosts first. Told to
    stop, it ends within a bound (`elastic/progress.py`). Call this from a process that has not
    started a thread.
    """
    with ExitStack() as held:
        withdraw(run_dir)  # what one that was killed left here
        sockets = str(held.enter_context(socket_directory(run_dir)))
        ready = nursed(prepare, run_dir / "logs" / "recipe.log")
        nursery, facts = held.enter_context(ready)
        hosts: Hosts | None = None
        if listening is not None:
            hosts = held.enter_context(gathered(nursery, facts, listening, run_dir, watch, sockets))
        prepared(facts)
        resizes = None
        if can_resize:
            resizes = open_resizes(run_dir, Plan.parse(facts["plan"]), facts["alone"])
        reach = Reach(sockets) if hosts is None else hosts.reach
        outcome = Supervisor(
            hosts or nursery, members(facts), run_dir, watch, reach, resizes, stop_timeout_s
        ).run()
        if hosts is not None:
            how = outcome.cause or f"the run ended after step {outcome.step}"
            hosts.farewell = Farewell(outcome.exit_code, how)
        return outcome
