"""Run what a back end has prepared, under the supervisor, until it ends; nothing is left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.cluster.backend import Backend, Facts, StartedRun
from shoal.cluster.invitation import remove_invitation
from shoal.elastic.membership import Membership, MembershipOptions
from shoal.elastic.resize_requests import ResizeRequests
from shoal.elastic.supervisor import Supervisor, SupervisorResult
from shoal.errors import ShoalError
from shoal.events.events import OnEvent
from shoal.plans.plan import Plan
from shoal.system.fork_server import Prepare


class RunFailed(ShoalError):
    """A run that has no result; `trace` is the traceback of the rank that failed."""

    def __init__(self, result: SupervisorResult):
        super().__init__(why_it_ended(result))
        self.trace, self.exit_code = result.trace, result.exit_code


def why_it_ended(result: SupervisorResult) -> str:
    return result.cause or f"it was stopped after step {result.step}"


def without_spares(started: StartedRun) -> Membership:
    """The ranks and servers that were found, for runs that are over soon."""
    found = started.facts
    return Membership(found["num_ranks"], found["num_servers"], MembershipOptions(num_spares=0))


def run_supervised(
    prepare: Prepare,
    run_dir: Path,
    *,
    backend: Backend,
    watch: OnEvent,
    members: Callable[[StartedRun], Membership] = without_spares,
    prepared: Callable[[Facts], None] = lambda facts: None,
    can_resize: bool = False,
    stop_timeout_s: float | None = None,
) -> SupervisorResult:
    """Prepare, start the members and supervise them to the end.

    `prepared` gets what the preparation found, before any member starts. With `can_resize` the
    run answers requests for another size. After a signal it ends within a bound
    (`elastic/progress.py`). Call this from the main thread of a process without other threads.
    """
    remove_invitation(run_dir)  # what a run that was killed left there
    with backend.start(prepare, run_dir, watch) as started:
        facts: dict[str, Any] = started.facts
        prepared(facts)
        resizes = None
        if can_resize:
            resizes = ResizeRequests(run_dir, Plan.parse(facts["plan"]), facts["alone"])
        result = Supervisor(
            started.processes,
            members(started),
            run_dir,
            watch,
            started.reach,
            resizes,
            stop_timeout_s,
        ).run()
        started.end(result.exit_code, result.cause or f"the run ended after step {result.step}")
        return result
